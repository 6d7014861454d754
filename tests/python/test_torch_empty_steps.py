"""A loss that has nothing to do with the model, on some ranks or all: their steps stay together."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import SGD, Adam

import poseidon.torch as poseidon
import workers
from optimizer_kinds import ClipsTotal
from torch_cases import all_equal, mean_loss, mlp, mlp_batch, own_rows, parameters_digest

KINDS = ("plain", "worker", "server", "whole")


def optimizer_of(kind: str, model: Any) -> Any:
    if kind == "plain":
        return SGD(model.parameters(), lr=0.1, momentum=0.9)
    if kind == "whole":
        return poseidon.DistributedOptimizer(ClipsTotal(model.parameters()), model)
    return poseidon.DistributedOptimizer(Adam(model.parameters(), lr=0.01), model, update=kind)


def train(kind: str, alone: bool, everywhere: bool) -> tuple[str, list[str]]:
    """`alone`: where a batch is left out the loss is a fresh zero, otherwise zero times the model's output."""
    model = poseidon.DistributedDataParallel(mlp(), scheme="ps")
    optimizer = optimizer_of(kind, model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(5):
            optimizer.zero_grad()
            loss = mean_loss(model, *map(own_rows, mlp_batch(step, 4 * poseidon.world_size())))
            if step in (0, 3) and (everywhere or poseidon.rank() == 1):
                loss = torch.zeros((), requires_grad=True) if alone else 0 * loss
            loss.backward()
            optimizer.step()
    return parameters_digest(model), [str(warning.message) for warning in told if "takes part" in str(warning.message)]


def one_rank_leaves_a_batch_out() -> list[Any]:
    answers = []
    for kind in KINDS:
        digest, told = train(kind, True, False)
        expected, never = train(kind, False, False)
        assert digest == expected, kind
        assert never == []
        assert len(told) == (poseidon.rank() == 1), kind
        assert all(text.startswith("rank 1: step() of ") for text in told)
        answers.append(digest)
    return answers


def test_a_rank_without_a_batch_takes_part() -> None:
    assert all_equal(workers.run(2, one_rank_leaves_a_batch_out))


def all_ranks_leave_a_batch_out() -> list[str]:
    return [train(kind, True, True)[0] for kind in KINDS]


def test_all_ranks_may_leave_a_batch_out() -> None:
    assert all_equal(workers.run(2, all_ranks_leave_a_batch_out))


def no_empty_steps() -> str:
    """What looks like one: evaluation with gradients, accumulation, a model that another optimizer trains, closures."""
    model, other = (poseidon.DistributedDataParallel(mlp(), scheme="ps") for _ in range(2))
    optimizer, second = (SGD(part.parameters(), lr=0.1) for part in (model, other))

    def loss(part: Any, step: int) -> torch.Tensor:
        return mean_loss(part, *map(own_rows, mlp_batch(step, 4 * poseidon.world_size())))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        result = loss(model, 9)
        result.backward()
        return result

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            loss(model, step).backward()
            if poseidon.rank() == 0:
                loss(model, step)  # rank 0 looks at a loss, and forgets no_grad()
            optimizer.step()
            if poseidon.rank() == 0:
                loss(model, step)
                optimizer.zero_grad()
                get_optimizer_state_dict(model.module, optimizer)
            with model.no_sync():
                loss(model, step).backward()
            loss(other, step).backward()
            second.step()
            optimizer.step(closure)
    return parameters_digest(model)


def test_what_is_no_empty_step() -> None:
    assert all_equal(workers.run(2, no_empty_steps))


def looks_before_a_closure() -> str:
    """Before the first step(closure) one rank looks at the model, and forgets no_grad()."""
    model = poseidon.DistributedDataParallel(mlp(), scheme="ps")
    optimizer = SGD(model.parameters(), lr=0.1)
    if poseidon.rank() == 0:
        mean_loss(model, *map(own_rows, mlp_batch(9, 4 * poseidon.world_size())))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = mean_loss(model, *map(own_rows, mlp_batch(0, 4 * poseidon.world_size())))
        loss.backward()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step(closure)
        optimizer.step(closure=closure)
    return parameters_digest(model)


def test_a_step_whose_closure_runs_backward_is_no_empty_one() -> None:
    assert all_equal(workers.run(2, looks_before_a_closure))


@pytest.mark.parametrize("world_size", [1])
def test_with_one_worker_nothing_is_exchanged(world_size: int) -> None:
    (told,) = (answer[1] for answer in workers.run(world_size, train, "worker", True, True))
    assert told == []
