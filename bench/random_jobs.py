#!/usr/bin/env python3
"""Trains random jobs on two workers beside one process, and says which of them differ.

    python bench/random_jobs.py --jobs 2000 --seed 1
    python bench/random_jobs.py --jobs 1 --seed 1234

The seed of a job stands for its model, layers, type of numbers, accumulation, checkpoints, compilation, hooks,
optimizer, scheme, wire format, update, and for what the program does with its memory and parameters
(tests/python/random_training.py). Jobs have the seeds from --seed on. Two processes stay up, and train one job after
the other. A job that fails prints its seed and description; the second command runs such a one alone. The exit status
is 1 if any job fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "python"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import random_training
import workers


def failure_of(seed: int, ranks: int) -> str | None:
    """What is wrong with the job of this seed, or None."""
    try:
        digests = workers.run(ranks, random_training.run_job, seed, **random_training.options(seed))
    except workers.WorkerError as error:
        return str(error)
    return None if len(set(digests)) == 1 else "the workers have different parameters"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    since, failed = time.monotonic(), 0
    for seed in range(given.seed, given.seed + given.jobs):
        text = failure_of(seed, given.ranks)
        if text is not None:
            failed += 1
            print(f"FAILED {random_training.describe(seed)}\n{text}", flush=True)
        elif (seed - given.seed) % 100 == 99:
            print(f"{seed - given.seed + 1} jobs, {failed} failed, {time.monotonic() - since:.0f} s", flush=True)
    print(f"{given.jobs} jobs from seed {given.seed}, {failed} failed, {time.monotonic() - since:.0f} s")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
