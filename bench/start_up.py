"""What it costs to start a job, and what a step of many small layers costs the thread that trains.

Prints the seconds from `init()` to the end of the first backward pass of a model of 40 layers, without imports. Then
it prints the median step of 240 small parameters: wall time, and CPU time of the training thread.

    poseidon run -n 2 bench/start_up.py
"""

from __future__ import annotations

import time
from statistics import median

import torch
import torch._dynamo  # torch's class imports it when a model is wrapped, which takes a second
from torch import nn

import poseidon.torch as poseidon

WARM_UP, STEPS = 50, 100


def first_step_seconds() -> tuple[float, float]:
    """Joins the job, wraps a model and runs one backward pass. Returns wall and CPU seconds."""
    module = nn.Sequential(*[nn.Linear(64, 64) for _ in range(40)])
    wall, cpu = time.perf_counter(), time.process_time()
    poseidon.init()
    model = poseidon.DistributedDataParallel(module)
    model(torch.ones(1, 64)).sum().backward()
    return time.perf_counter() - wall, time.process_time() - cpu


def small_steps() -> list[tuple[float, float]]:
    """Wall and CPU seconds of steps whose exchange is all messages and no bytes."""
    model = poseidon.DistributedDataParallel(nn.Sequential(*[nn.Linear(16, 16) for _ in range(120)]))
    times = []
    for _ in range(WARM_UP + STEPS):
        wall, cpu = time.perf_counter(), time.thread_time()
        model.zero_grad()
        model(torch.ones(1, 16)).sum().backward()
        times.append((time.perf_counter() - wall, time.thread_time() - cpu))
    return times[WARM_UP:]


def main() -> None:
    start, start_cpu = first_step_seconds()
    walls, cpus = zip(*small_steps(), strict=True)
    if poseidon.rank() == 0:
        print(f"start to the end of the first step {start:.3f} s, CPU {start_cpu:.3f} s")
        wall_ms, cpu_ms = median(walls) * 1e3, median(cpus) * 1e3
        print(f"step of 240 small parameters {wall_ms:.2f} ms, CPU of its thread {cpu_ms:.2f} ms")
    poseidon.shutdown()


if __name__ == "__main__":
    main()
