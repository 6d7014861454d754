"""A wrapped model that is converted, replaced or copied: what would train each rank alone is refused on all."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import poseidon.torch as poseidon
import workers
from poseidon.errors import InvalidArgument
from torch_cases import all_equal, mean_loss, mlp, mlp_batch, own_rows, parameters_digest


def own_batch(step: int) -> list[torch.Tensor]:
    return [own_rows(one) for one in mlp_batch(step, 4 * poseidon.world_size())]


def halves(module: nn.Module) -> None:
    module.bfloat16()
    module.float()


def part_halves(module: nn.Module) -> None:
    last = list(module.children())[-1]
    last.double()
    last.float()


def trained_with(change: Callable[[nn.Module], None], scheme: str) -> str:
    model = poseidon.DistributedDataParallel(mlp(), scheme=scheme)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        if step == 2:
            change(model.module)
        optimizer.zero_grad()
        try:
            mean_loss(model, *own_batch(step)).backward()
        except InvalidArgument as error:
            return str(error)
        optimizer.step()
    return "trained"


@pytest.mark.parametrize("scheme", ["auto", "sfb"])
@pytest.mark.parametrize("change", [halves, part_halves])
def test_a_conversion_and_back_takes_the_hooks_away(change: Callable[[nn.Module], None], scheme: str) -> None:
    answers = workers.run(2, trained_with, change, scheme)
    assert all_equal(answers)
    assert "has lost its gradient hooks" in answers[0]


def left_as_it_was(module: nn.Module) -> None:
    copied = copy.deepcopy(module)
    halves(copied)
    module.float()
    module.to("cpu")


def test_converting_a_copy_or_to_what_it_is_changes_nothing() -> None:
    assert workers.run(2, trained_with, left_as_it_was, "auto") == ["trained"] * 2


def replaced_by(kind: str) -> str:
    models = [poseidon.DistributedDataParallel(mlp()) for _ in range(2)]
    plain = models[0].module
    normed = nn.Sequential(plain, nn.BatchNorm1d(plain[-1].out_features, affine=False))
    models[0].module = normed if kind == "buffers" else nn.Sequential(plain, models[1].module)
    try:
        models[0](own_batch(0)[0])
    except InvalidArgument as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize(("kind", "why"), [("buffers", "whose buffer 1.running_mean"), ("of another", "was put into")])
def test_a_module_with_other_buffers_or_with_anothers_parameters_is_refused(kind: str, why: str) -> None:
    answers = workers.run(2, replaced_by, kind)
    assert all_equal(answers)
    assert why in answers[0]


def evaluated_on_copies() -> list[Any]:
    model = mlp()
    optimizer = poseidon.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), every=2)
    evaluated = copy.deepcopy(model)
    for step in range(4):
        optimizer.zero_grad()
        mean_loss(model, *own_batch(step)).backward()
        optimizer.step()
        if poseidon.rank() == 0:
            evaluated.load_state_dict(model.state_dict())
            pickle.loads(pickle.dumps(model)).load_state_dict(model.state_dict())
    return [parameters_digest(model)]


def test_one_rank_may_evaluate_a_copy_of_a_model_of_local_sgd() -> None:
    assert all_equal(workers.run(2, evaluated_on_copies))


def weights_of_one_averaging() -> str:
    model = mlp()
    optimizer = poseidon.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), every=2)
    try:
        optimizer.set_weight(1)
        mean_loss(model, *own_batch(0)).backward()
        optimizer.set_weight(1)
        optimizer.set_weight(7)
    except poseidon.PoseidonError as error:
        return str(error)
    return "trained"


def test_micro_batches_of_a_step_have_one_weight() -> None:
    for answer in workers.run_fresh(2, joined_and, weights_of_one_averaging):  # whoever comes later hears of the other
        assert "is 1 since the last averaging, and would become 7" in answer


def joined_and(case: Callable[[], str]) -> str:
    poseidon.init()
    return case()
