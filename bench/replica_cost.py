"""What the check of the replicas costs, and how soon it finds a bit.

Workers train parameters of ResNet-50's sizes. Compute is replaced by sleep; gradients are exchanged, and SGD updates.
The cost is the time that passes for the training thread in the check, as a share of the run's. Time in which it could
run and other workers have the cores does not count: in a job every worker has cores of its own. Half of the time of the
run a rank flips one bit: with --every N all ranks must say so, and name the parameter, within N steps. The exit status
is 1 if the cost after the first two looks is above the bar, or if the bit is not found.

    python bench/replica_cost.py                # the default: as seldom as it takes
    python bench/replica_cost.py --every 5      # a flipped bit, found within 5 steps
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import poseidon.torch as poseidon
from poseidon.adapter.replica_check import ReplicaCheck
from poseidon.errors import Mismatch
from poseidon.models import MODELS

BAR = 0.001
FIRST_LOOKS_END = 11  # steps; the comparison after step 10 ends in the next one


def passed_s() -> float:
    """A clock of this thread that stands still while the thread could run and other processes have the cores."""
    delayed_ns = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    return time.perf_counter() - delayed_ns / 1e9


class Clock:
    """The time that this thread spends in the check, from outside of it."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self.calls: list[float] = []
        inner = ReplicaCheck.begin_step

        def begin_step(check: ReplicaCheck, *given: Any) -> int:
            began_s, processor_s = passed_s(), time.thread_time()
            try:
                return inner(check, *given)
            finally:
                # A delay that began before the call is known only when it ends: so not less than the processor's time.
                call_s = max(passed_s() - began_s, time.thread_time() - processor_s)
                self.spent_s += call_s
                self.calls.append(call_s)

        ReplicaCheck.begin_step = begin_step  # type: ignore[method-assign, assignment]


class Net(nn.Module):
    """ResNet-50's parameters in one sum."""

    def __init__(self) -> None:
        super().__init__()
        layers = MODELS["ResNet-50"]().layers
        self.params = nn.ParameterDict(
            {
                layer.name.replace(".", "_"): nn.Parameter(torch.ones(layer.weight_count + layer.bias_count))
                for layer in layers
            }
        )

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        return torch.stack([param.sum() for param in self.params.values()]).sum() * scale


def work(rank: int, args: argparse.Namespace, results: Any) -> None:
    """A worker's main: puts its rank, what it has measured, and what it was told."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(args.ranks), "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(args.port)
    torch.set_num_threads(1)
    clock = Clock()
    poseidon.init(replica_check=args.every or "auto", timeout=600.0)
    net = Net()
    model = poseidon.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    began_s = after_first_s = time.perf_counter()
    first_spent_s, told, step = 0.0, "", 0
    for step in range(args.steps):
        if step == FIRST_LOOKS_END:
            after_first_s, first_spent_s = time.perf_counter(), clock.spent_s
        if args.every and step == args.steps // 2 and rank == args.ranks - 1:
            list(net.parameters())[args.flip].data.view(torch.int32)[0] ^= 1
        optimizer.zero_grad()
        time.sleep(args.compute_ms / 1e3)
        try:
            model(torch.tensor(1.0 + rank)).backward()
        except Mismatch as difference:
            told = str(difference)
            break
        optimizer.step()
    now_s = time.perf_counter()
    looks = [call_s for call_s in clock.calls if call_s > max(clock.calls) / 10]
    total, later = (clock.spent_s, now_s - began_s), (clock.spent_s - first_spent_s, now_s - after_first_s)
    results.put((rank, total, later, looks, told, step - args.steps // 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--compute-ms", type=float, default=200.0, help="of a step, replaced by sleep")
    parser.add_argument("--every", type=int, default=0, help="replica_check, and a bit is flipped; default: auto")
    parser.add_argument("--flip", type=int, default=20, help="the parameter that a rank's flipped bit is in")
    parser.add_argument("--port", type=int, default=29610, help="where the workers meet")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [context.Process(target=work, args=(rank, args, results)) for rank in range(args.ranks)]
    for worker in workers:
        worker.start()
    rows = sorted(results.get() for _ in workers)
    for worker in workers:
        worker.join()
    name = list(Net().params)[args.flip]
    failed = False
    for rank, (spent_s, run_s), (later_s, later_run_s), looks, told, late in rows:
        if args.every:
            found = f"parameter params.{name} " in told and late <= args.every
            failed |= not found
            print(f"rank {rank}: {f'named after {late} steps' if found else 'not found'}: {told[:100]}")
            continue
        failed |= later_s / later_run_s > BAR
        print(
            f"rank {rank}: {len(looks)} looks of {1e3 * sum(looks) / len(looks):.1f} ms in {run_s:.0f} s, "
            f"{spent_s / run_s:.3%}; after the first two {later_s / later_run_s:.3%} (bar {BAR:.1%})"
        )
    sys.exit(failed)


if __name__ == "__main__":
    main()
