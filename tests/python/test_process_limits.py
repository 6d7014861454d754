"""Limits of the process that a worker runs in: raised where that is allowed, and said where they are too low."""

from __future__ import annotations

import os
import resource

import torch
from torch import nn

import poseidon.torch as poseidon
import workers

SIZE = 4096


def trains_with_few_descriptors() -> bool:
    """Whether one step works in a process that may at first open a few more files."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 18, most))
    poseidon.init()
    model = poseidon.DistributedDataParallel(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    poseidon.shutdown()
    return True


def connects_below_its_hard_limit(count: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))
    poseidon.init(priority_classes=8, flows=16)


def receives_more_than_it_may_hold(factor_count: int) -> None:
    """Rank 1 has a batch whose factors rank 0 has no memory for."""
    poseidon.init()
    model = poseidon.DistributedDataParallel(nn.Linear(SIZE, 2 * SIZE, bias=False), scheme="sfb")
    model(torch.ones(1, SIZE)).mean().backward()
    model.zero_grad()
    if poseidon.rank() == 0:
        gradient_bytes = 2 * SIZE * SIZE * 4  # which torch takes
        with open("/proc/self/statm", encoding="ascii") as memory:
            used = int(memory.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + gradient_bytes + (48 << 20), resource.RLIM_INFINITY))
    model(torch.ones(factor_count if poseidon.rank() == 1 else 1, SIZE)).mean().backward()


def test_a_low_soft_limit_of_descriptors_is_raised() -> None:
    assert workers.run_fresh(2, trains_with_few_descriptors) == [True, True]


def test_a_hard_limit_of_descriptors_that_is_too_low_is_named() -> None:
    failures = workers.run_fresh(2, connects_below_its_hard_limit, 200)
    assert all(isinstance(failure, workers.Failure) for failure in failures)
    assert any("ulimit -Hn" in failure.text for failure in failures)  # the others may learn only that it is gone


def test_a_payload_that_finds_no_memory_fails_the_job_and_not_the_process() -> None:
    factor_count = 1500  # fewer bytes than the gradient has, more than rank 0 may take
    failure = workers.run_fresh(2, receives_more_than_it_may_hold, factor_count)[0]
    assert isinstance(failure, workers.Failure), failure
    assert "no memory" in failure.text
    assert str(factor_count * 3 * SIZE * 4) in failure.text
