#!/usr/bin/env python3
"""What a model of many small parameters costs: wrapping and steps, beside torch's DistributedDataParallel over gloo.

    python bench/many_parameters.py --parameters 5000 --steps 20

Two processes train the same model with both classes in turn over loopback. Times are medians, and ratios are Poseidon's
time over torch's; at the end their median and spread over the rounds. Processor time is that of all threads.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import poseidon.torch as poseidon

WARM_UP = 3


class Many(nn.Module):
    """A product of many small parameters."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ParameterList(nn.Parameter(torch.rand(8)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.stack(list(self.parts)) * x).square().mean()


def timed(wrap: Any, count: int, steps: int) -> dict[str, list[float]]:
    """Seconds of wrapping and of steps, by the clock and of the processor."""
    found: dict[str, list[float]] = {"wrap": [], "wrap, processor": [], "step": [], "step, processor": []}

    def measure(what: str, action: Callable[[], Any]) -> Any:
        dist.barrier()
        since, used = time.perf_counter(), time.process_time()
        result = action()
        found[what].append(time.perf_counter() - since)
        found[f"{what}, processor"].append(time.process_time() - used)
        return result

    for _ in range(3):
        module = Many(count)
        model = measure("wrap", partial(wrap, module))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(8)).backward()
        optimizer.step()

    for _ in range(steps + WARM_UP):
        measure("step", step)
    return {what: seconds[WARM_UP if what.startswith("step") else 1 :] for what, seconds in found.items()}


def work(count: int, steps: int, rounds: int) -> None:
    """Measures on this rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    poseidon.init()
    ratios: dict[str, list[float]] = {}
    for _ in range(rounds):
        theirs = timed(DistributedDataParallel, count, steps)
        ours = timed(poseidon.DistributedDataParallel, count, steps)
        for what, seconds in ours.items():
            one, other = statistics.median(seconds), statistics.median(theirs[what])
            ratios.setdefault(what, []).append(one / other)
            if dist.get_rank() == 0:
                print(f"{what}: {one * 1e3:.1f} ms, torch {other * 1e3:.1f} ms, {one / other:.2f} x", flush=True)
    if dist.get_rank() == 0:
        for what, found in ratios.items():
            middle = statistics.median(found)
            print(f"{what}: median {middle:.2f} x, from {min(found):.2f} to {max(found):.2f}, {rounds} rounds")
    dist.barrier()
    poseidon.shutdown()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=5000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if "RANK" in os.environ:
        work(given.parameters, given.steps, given.rounds)
        return
    command = [sys.executable, "-m", "poseidon", "run", "-n", "2", __file__, *sys.argv[1:]]
    sys.exit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    main()
