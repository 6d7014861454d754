#!/usr/bin/env python3
"""Inside a machine: `python bench/machines.py [--workers N] [--megabytes N]`.

N workers exchange one array over shared memory. Their step is compared with Gloo's all-reduce in the same run, and
with the memory's speed: with the time that as many processes at once need to copy the bytes that the exchange has to
read and write. Each worker copies the others' parts of its gradient to them, adds its own part of all gradients, and
gives the sum to the others, each of which copies it to where it belongs.
"""

from __future__ import annotations

import argparse
import time
from multiprocessing.synchronize import Barrier
from statistics import median

import numpy as np

from poseidon.bench.exchange.methods import parse_methods, parse_placement, parse_workload
from poseidon.bench.exchange.results import ExchangeConfig
from poseidon.bench.exchange.run import run_exchange
from poseidon.bench.hosts.fleet import LOOPBACK, make_barrier, start_fleet

_MB = 10**6
_COPIES = 5


class Copier:
    """A process that copies at memory speed."""

    def __init__(self, size_bytes: int, barrier: Barrier) -> None:
        self._barrier = barrier
        self._source = np.ones(size_bytes, np.uint8)
        self._target = np.zeros(size_bytes, np.uint8)

    def copy(self) -> float:
        """Returns the seconds of one copy, the median of several, while the others copy, too."""
        seconds = []
        for _ in range(_COPIES):
            self._barrier.wait()
            begin = time.monotonic()
            np.copyto(self._target, self._source)
            self._barrier.wait()
            seconds.append(time.monotonic() - begin)
        return median(seconds)


def moved_bytes(size_bytes: int, worker_count: int) -> float:
    """What one worker has to read and write."""
    own, others = size_bytes / worker_count, size_bytes * (worker_count - 1) / worker_count
    added = size_bytes + own  # its part of each gradient, and the sum
    # Copied: the gradient to the others; the sum to each of them; the others' sums to where they belong.
    return 3 * 2 * others + added


def main() -> None:
    """Prints step, Gloo's step and the bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    workers, size = arguments.workers, arguments.megabytes * _MB
    barrier = make_barrier(workers)
    with start_fleet([LOOPBACK] * workers, lambda rank: Copier(size, barrier)) as fleet:
        copy_seconds = max(fleet.call_same("copy", timeout_seconds=60))
    bound = moved_bytes(size, workers) / (2 * size) * copy_seconds
    config = ExchangeConfig(
        workload=parse_workload(f"tensors:1x{arguments.megabytes}MB", 1),
        worker_count=workers,
        link=None,
        placement=parse_placement("cs"),
        methods=parse_methods("poseidon,gloo", ["transport=auto"]),
        step_count=5,
        repeat_count=arguments.repeats,
    )
    steps = {method.method: method.median_seconds for method in run_exchange(config).methods}
    print(f"{workers} workers of one machine, {arguments.megabytes} MB:")
    print(
        f"  step {steps['poseidon']:.3f} s; Gloo {steps['gloo']:.3f} s: {steps['gloo'] / steps['poseidon']:.2f} times"
    )
    print(f"  the copies and sums at memory speed {bound:.3f} s: {bound / steps['poseidon']:.2f} of it reached")


if __name__ == "__main__":
    main()
