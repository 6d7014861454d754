"""Parameters that only a late rank has a gradient for (stragglers=drop): it must not be alone in using it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

import poseidon.torch as poseidon
import workers
from poseidon.torch.process.context import context
from test_torch_staged import staged
from torch_cases import all_equal, parameters_digest
from waiting import compute_for

WORLD_SIZE = 3
SLOW = 2
WARM_UP = 11  # steps in which servers drop nobody, and one
STEPS = WARM_UP + 4
LARGE = {"stragglers": "drop", "chunk_bytes": 4096, "small_bytes": 0}  # a weight is of several chunks
GROUPED = {"stragglers": "drop"}  # all parameters travel together


class Branches(nn.Module):
    """The slow rank alone uses two of the layers, one of them in every other step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.common, self.rare, self.rarer = (nn.Linear(48, 48) for _ in range(3))

    def forward(self, inputs: torch.Tensor, step: int) -> torch.Tensor:
        hidden = self.common(inputs)
        if poseidon.rank() == SLOW:
            hidden = hidden + self.rare(inputs)
            if step % 2:
                hidden = hidden + self.rarer(inputs)
        return hidden


@dataclass
class Outcome:
    digest: str
    late_steps: int  # in which the slow rank was left out of what it alone had
    counts: list[float]  # of the optimizer's steps, by parameter
    lost_gradient: float = 0.0  # what a rank sees of a gradient that came too late, before step()


def optimizer_of(params: Any, update: str | None) -> Optimizer:
    if update == "server":
        return Adam(params, lr=0.01, weight_decay=0.1)
    return SGD(params, lr=0.05, momentum=0.9, weight_decay=0.1)


def train(update: str | None, reads: bool) -> Outcome:
    model = poseidon.DistributedDataParallel(Branches())
    optimizer = optimizer_of(model.module.parameters(), update)
    if update is not None:
        optimizer = poseidon.DistributedOptimizer(optimizer, model, update)
    client, outcome = context().client, Outcome("", 0, [])
    assert client is not None
    layer = next(entry.layer for entry in model.synced_parameters if entry.name == "rare.weight")
    inputs = torch.ones(4, 48)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(inputs, step).square().mean()
        slow = poseidon.rank() == SLOW and step >= WARM_UP
        compute_for(0.06 if slow else 0.002)
        loss.backward()
        if reads and model.module.rare.weight.grad is not None:
            size = float(model.module.rare.weight.grad.abs().sum())
            outcome.lost_gradient += size if client.layer_stats(layer).late else 0
        optimizer.step()
        if isinstance(optimizer, poseidon.DistributedOptimizer):
            optimizer.synchronize()
        outcome.late_steps += client.layer_stats(layer).late
    poseidon.barrier()
    outcome.digest = parameters_digest(model.module)
    if update == "server":
        states = optimizer.state_dict()["state"].values()
        outcome.counts = [float(state["step"]) for state in states]
    return outcome


def check(answers: list[Outcome]) -> None:
    assert answers[SLOW].late_steps > 0
    assert all_equal([answer.digest for answer in answers])
    assert all_equal([answer.counts for answer in answers])
    assert answers[SLOW].lost_gradient == 0


@pytest.mark.parametrize("options", [LARGE, GROUPED], ids=["large", "grouped"])
@pytest.mark.parametrize("update", [None, "worker"])
def test_a_gradient_that_came_too_late_is_used_by_nobody(update: str | None, options: dict[str, Any]) -> None:
    check(workers.run(WORLD_SIZE, train, update, True, **options))


def test_on_the_servers_it_counts_as_no_update() -> None:
    answers = workers.run(WORLD_SIZE, train, "server", False, **LARGE)
    check(answers)
    assert min(answers[0].counts) < STEPS // 2 < WARM_UP <= max(answers[0].counts)


@pytest.mark.parametrize("update", [None, "server"])
def test_through_host_memory(update: str | None) -> None:
    check(workers.run(WORLD_SIZE, staged, train, update, False, **LARGE))
