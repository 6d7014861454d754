"""What must be the same on all ranks in every step, and is found at once where it is not."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ReduceLROnPlateau

import poseidon.torch as poseidon
import workers
from optimizer_kinds import SlowWeights
from poseidon.errors import Mismatch
from torch_cases import all_equal, mean_loss, mlp, mlp_batch, own_rows, parameters_digest


def step(model: Any, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    mean_loss(model, *map(own_rows, mlp_batch(number, 4 * poseidon.world_size()))).backward()
    optimizer.step()


def lowered(optimizer: Any) -> None:
    """A scheduler that looks at this rank's own loss."""
    scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
    for loss in (1.0, 1.0 if poseidon.rank() == 1 else 0.5):
        scheduler.step(loss)


def loaded(optimizer: Any) -> None:
    if poseidon.rank() == 1:
        optimizer.load_state_dict(optimizer.state_dict())


def skipped(optimizer: Any) -> None:
    """Rank 1 has looked at its own loss and left the step out."""
    if poseidon.rank() != 1:
        optimizer.step()


def tensor(optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"].mul_(1 + poseidon.rank() // 2)


def own_key(optimizer: Any) -> None:
    optimizer.param_groups[1]["warmed up"] = poseidon.rank() < 2


CASES: list[tuple[Callable[[Any], None], str]] = [
    (lowered, r"differ in lr of parameter group 0 of Adam: 0.01 on ranks 0, 2, 0.001 on rank 1; change it on all"),
    (loaded, r"number of load_state_dict\(\) calls of Adam: 0 on ranks 0, 2, 1 on rank 1"),
    (skipped, r"step\(\) calls of Adam since the last backward pass: 2 on ranks 0, 2, 1 on rank 1"),
    (tensor, r"lr of parameter group 0 of Adam: 0.0099.* on ranks 0, 1, 0.0199.* on rank 2"),
    (own_key, r"warmed up of parameter group 1 of Adam: True on ranks 0, 1, False on rank 2"),
]


def differ(number: int, update: str) -> str:
    change, _ = CASES[number]
    model = poseidon.DistributedDataParallel(mlp())
    params = list(model.parameters())
    rate: Any = torch.tensor(0.01) if change is tensor else 0.01
    groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.1}]
    optimizer = poseidon.DistributedOptimizer(Adam(groups, lr=rate), model, update=update)
    for earlier in range(2):
        step(model, optimizer, earlier)
    change(optimizer)
    with pytest.raises(Mismatch) as caught:
        two_steps(model, optimizer)
    return str(caught.value)


def two_steps(model: Any, optimizer: Any) -> None:
    for number in range(2, 4):
        step(model, optimizer, number)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_difference_names_group_key_and_ranks(number: int) -> None:
    for answer in workers.run(3, differ, number, "worker"):
        workers_match(CASES[number][1], answer)


def test_a_difference_is_found_with_updates_on_servers() -> None:
    for answer in workers.run(3, differ, 0, "server"):
        workers_match(CASES[0][1], answer)


def workers_match(pattern: str, text: str) -> None:
    assert re.search(pattern, text), text


def the_same() -> str:
    """Hyperparameters that all change alike, ranks that leave join() at different times, an optimizer of any kind."""
    model = poseidon.DistributedDataParallel(mlp())
    optimizer = poseidon.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model)
    for number in range(3):
        step(model, optimizer, number)
        optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.load_state_dict(optimizer.state_dict())
    with model.join():
        for number in range(3 + poseidon.rank()):
            step(model, optimizer, number)
    for number in range(3):
        step(model, optimizer, number)
    optimizer = poseidon.DistributedOptimizer(SlowWeights(model.parameters()), model)
    for number in range(3):
        step(model, optimizer, number)
        optimizer.param_groups[0]["lr"] *= 0.5
    return parameters_digest(model)


def test_what_all_ranks_do_is_no_difference() -> None:
    assert all_equal(workers.run(3, the_same))
