"""Random jobs about optimizers (random_optimizers.py) have the bits of plain loops, on every rank."""

from __future__ import annotations

import warnings

import pytest

import workers
from random_optimizers import check, draw
from torch_cases import all_equal


def jobs(first: int, count: int) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [check(draw(seed)) for seed in range(first, first + count)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_random_jobs_have_the_bits_of_plain_loops(world_size: int) -> None:
    assert all_equal(workers.run(world_size, jobs, 100 * world_size, 10, chunk_bytes=4096))
