"""Random training jobs beside one process. `bench/random_jobs.py` trains as many as one wants."""

from __future__ import annotations

import random_training
import workers
from torch_cases import all_equal

FIRST_SEED = 100
JOBS = 40


def test_random_jobs_train_as_one_process() -> None:
    for seed in range(FIRST_SEED, FIRST_SEED + JOBS):
        options = random_training.options(seed)
        try:
            assert all_equal(workers.run(2, random_training.run_job, seed, **options))
        except AssertionError as error:
            raise AssertionError(f"{random_training.describe(seed)}\n{error}") from error
