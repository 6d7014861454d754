"""Resident memory stays where it is, whatever the sizes that come."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch import nn

import poseidon.torch as poseidon
import workers

SIZE = 1024
STEPS = 150
MOST_ROWS = 500


def resident_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("the system does not say how much memory this process holds")


def grown_mb() -> float:
    """By how much this process has grown over steps whose batches differ, after the largest of them."""
    poseidon.init()
    model = poseidon.DistributedDataParallel(nn.Linear(SIZE, SIZE, bias=False), scheme="sfb")
    sizes = random.Random(poseidon.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    before = 0.0
    for step in range(STEPS):
        rows = MOST_ROWS if step < 5 else sizes.randint(1, MOST_ROWS)
        optimizer.zero_grad()
        model(torch.ones(rows, SIZE)).mean().backward()
        optimizer.step()
        if step == 5:
            before = resident_mb()
    grown = resident_mb() - before
    poseidon.shutdown()
    return grown


def test_batches_that_vary_do_not_add_up_under_sfb() -> None:
    # The factors of all steps would be 150 * 250 * 4 kB * 2, 300 MB.
    grown = workers.run_fresh(2, grown_mb)
    assert all(isinstance(one, float) and one < 150 for one in grown), grown
