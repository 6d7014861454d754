"""Random jobs of push and pull on arrays. `bench/random_jobs.py --framework arrays` does as many as one wants."""

from __future__ import annotations

import pytest

from random_runs import RandomJobs

FIRST_SEED = 100
JOBS = 50


@pytest.mark.parametrize("ranks", [2, 3])
def test_random_jobs_have_the_values_of_one_process(ranks: int) -> None:
    jobs = RandomJobs("arrays", ranks)
    try:
        assert jobs.failures(range(FIRST_SEED, FIRST_SEED + JOBS)) == []
    finally:
        jobs.close()
