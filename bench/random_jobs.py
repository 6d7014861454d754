#!/usr/bin/env python3
"""Trains random jobs on two workers beside one process, and says which of them differ.

    python bench/random_jobs.py --jobs 2000 --seed 1
    python bench/random_jobs.py --framework jax --jobs 300
    python bench/random_jobs.py --framework tensorflow --jobs 1 --seed 1234

The seed of a job stands for its model, layers, type of numbers, optimizer, and for what the program does with its
memory and parameters: tests/python/random_training.py, random_jax.py, random_tensorflow.py, and random_arrays.py for
push and pull. Jobs have the seeds from --seed on. The same processes train one job after the other. A job that fails
prints its description, and the command that repeats it alone. The exit status is 1 if any job fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "python"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from random_runs import FRAMEWORKS, RandomJobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--framework", choices=FRAMEWORKS, default="torch")
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    jobs, since, failed = RandomJobs(given.framework, given.ranks), time.monotonic(), 0
    for seed in range(given.seed, given.seed + given.jobs):
        text = jobs.failure_of(seed)
        if text is not None:
            failed += 1
            print(f"FAILED {text}", flush=True)
        elif (seed - given.seed) % 100 == 99:
            print(f"{seed - given.seed + 1} jobs, {failed} failed, {time.monotonic() - since:.0f} s", flush=True)
    print(
        f"{given.jobs} {given.framework} jobs from seed {given.seed}, {failed} failed, {time.monotonic() - since:.0f} s"
    )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
