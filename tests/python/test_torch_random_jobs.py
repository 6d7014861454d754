"""Random training jobs beside one process. `bench/random_jobs.py` trains as many as one wants."""

from __future__ import annotations

from random_runs import RandomJobs

FIRST_SEED = 100
JOBS = 40


def test_random_jobs_train_as_one_process() -> None:
    assert RandomJobs("torch").failures(range(FIRST_SEED, FIRST_SEED + JOBS)) == []
