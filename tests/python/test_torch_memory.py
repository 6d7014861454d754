"""Resident memory stays where it is, whatever the sizes that come."""

from __future__ import annotations

import gc
import random
import weakref
from pathlib import Path

import torch
from torch import nn

import poseidon.torch as poseidon
import workers
from torch_cases import mean_loss, mlp, mlp_batch

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


def one_model_after_the_other() -> list[bool]:
    """Whether each of some models, dropped with updates in flight, is gone once the next one has trained."""
    gone, last = [], None
    for _ in range(3):
        module = mlp()
        model = poseidon.DistributedDataParallel(module)
        optimizer = poseidon.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), model)
        for step in range(2):
            optimizer.zero_grad()
            mean_loss(model, *mlp_batch(step, 4)).backward()
            optimizer.step()
        gc.collect()
        if last is not None:
            gone.append(all(one() is None for one in last))
        last = [weakref.ref(model.synchronizer), *map(weakref.ref, module.parameters())]
        del module, model, optimizer
    return gone


def test_models_dropped_with_updates_in_flight_are_freed() -> None:
    assert workers.run(2, one_model_after_the_other) == [[True, True]] * 2
