"""on_failure=shrink: training goes on with fewer workers, and with more again when they come."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import poseidon.torch as poseidon
from poseidon.adapter import recovery as recovery_module
from recovery_cases import Fault, Faults, Supervisor, batch
from waiting import compute_for


def small() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 4))


def step_of(model: Any, optimizer: torch.optim.Optimizer, losses: list[torch.Tensor]) -> None:
    (sum(losses[1:], losses[0]) / len(losses)).backward()
    optimizer.step()


def loss_of(model: nn.Module, step: int, rank: int, size: int) -> torch.Tensor:
    inputs, target = batch(step, rank, size)
    return nn.functional.mse_loss(model(inputs), target)


def train(
    folder: Path, faults: list[Fault], steps: int, pause: float, overlap: bool, busy: dict[str, float] | None = None
) -> dict[str, Any]:
    """The last parameters, and with how many workers each step was made. `busy`: seconds that a RANK computes."""
    compute_seconds = (busy or {}).get(os.environ["RANK"], 0.0)
    dies = Faults(folder, faults)
    poseidon.init(on_failure="shrink")
    module = small()
    model = poseidon.DistributedDataParallel(module)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if overlap:
        optimizer = poseidon.DistributedOptimizer(optimizer, model)
    sizes: dict[int, int] = {}
    with mock.patch.object(recovery_module, "_LOOK_SECONDS", 0.1):
        recovery = poseidon.Recovery(model, optimizer)
        while recovery.until(steps):
            with recovery.attempt():
                step, size = recovery.step, poseidon.world_size()
                optimizer.zero_grad()
                compute_for(compute_seconds)
                loss = loss_of(model, step, poseidon.rank(), size)
                dies.reached("forward", step)
                step_of(model, optimizer, [loss])
                sizes[step] = size
                compute_for(pause)
    return {
        "params": [param.tolist() for param in module.parameters()],
        "sizes": sizes,
        "generation": recovery.history[-1].generation if recovery.history else 0,
        "rank": poseidon.rank(),
    }


def replay(sizes: list[int]) -> list[torch.Tensor]:
    """The parameters of one process that makes the same steps with all the rows of those who were there."""
    module = small()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step, size in enumerate(sizes):
        optimizer.zero_grad()
        step_of(module, optimizer, [loss_of(module, step, rank, size) for rank in range(size)])
    return [param.detach() for param in module.parameters()]


def check(answer: dict[str, Any], steps: int) -> list[int]:
    """Compares with a replay; returns the numbers of workers by step."""
    sizes = [answer["sizes"][str(step)] for step in range(steps)]
    for ours, theirs in zip(answer["params"], replay(sizes), strict=True):
        torch.testing.assert_close(torch.tensor(ours), theirs, rtol=1e-4, atol=1e-5)
    return sizes


@pytest.mark.parametrize("overlap", [False, True])
def test_goes_on_with_fewer(tmp_path: Path, overlap: bool) -> None:
    supervisor = Supervisor(tmp_path, 3, restarts=0)
    answers = supervisor.run(train, [Fault(1, 3, "forward")], 6, 0.0, overlap)
    assert answers[1] is None
    for answer in (answers[0], answers[2]):
        assert check(answer, 6)[-1] == 2
        assert answer["generation"] >= 2
    assert [answers[0]["rank"], answers[2]["rank"]] == [0, 1]
    assert answers[0]["params"] == answers[2]["params"]


def test_goes_on_alone_and_grows_again(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, 2)
    answers = supervisor.run(train, [Fault(1, 3, "forward")], 100, 0.02, False)
    assert answers[0]["params"] == answers[1]["params"]
    sizes = check(answers[0], 100)
    assert sizes[-1] == 2
    assert json.dumps(sorted(answers[1]["sizes"], key=int)[-1]) == '"99"'


def test_who_computes_while_the_others_meet_joins_them(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, 3, restarts=0)
    busy = {"0": 0.8, "2": 1.4}  # more than half a second, for which the others wait
    answers = supervisor.run(train, [Fault(1, 0, "forward")], 3, 0.0, False, busy)
    assert answers[0]["params"] == answers[2]["params"]
    sizes = [answers[rank]["sizes"] for rank in (0, 2)]
    assert sizes[0]["2"] == sizes[1]["2"] == 2
    assert not all(1 in made.values() for made in sizes), "each went on alone, beside the other"
