"""Some random jobs of JAX and TensorFlow. `bench/random_jobs.py --framework jax` trains as many as one wants."""

from __future__ import annotations

import pytest

from runs import skip_without

JOBS = {"jax": (88, 92, 93, 96), "tensorflow": (81, 87, 95)}
NEEDS = {"jax": ("jax", "optax"), "tensorflow": ("tensorflow", "keras")}


@pytest.mark.parametrize("framework", JOBS)
def test_random_jobs_train_as_one_process(framework: str) -> None:
    skip_without(*NEEDS[framework])
    from random_runs import RandomJobs

    jobs = RandomJobs(framework)
    try:
        assert jobs.failures(JOBS[framework]) == []
    finally:
        jobs.close()
