"""Updates on the servers, which learn the parameter groups once: a program that changes them is told so."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import poseidon.torch as poseidon
import workers
from poseidon.errors import InvalidArgument
from test_torch_server_update import assert_same_bits
from torch_cases import all_equal, mean_loss, mlp, mlp_batch, own_rows, parameters_digest


def pair() -> list[tuple[Any, Any]]:
    """The same model and optimizer of two groups with updates on the servers and without."""
    parts = []
    for server in (True, False):
        model = poseidon.DistributedDataParallel(mlp(), scheme="ps")
        params = list(model.parameters())
        groups: Any = [{"params": params[:2]}, {"params": params[2:], "lr": 0.0}]
        optimizer: Any = SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.1)
        if server:
            optimizer = poseidon.DistributedOptimizer(optimizer, model, update="server")
        parts.append((model, optimizer))
    return parts


def backward(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    mean_loss(model, *map(own_rows, mlp_batch(step, 4 * poseidon.world_size()))).backward()


def change(optimizer: Any, how: str) -> None:
    first, second = optimizer.param_groups
    if how == "taken out":
        first["params"] = first["params"][1:]
    elif how == "moved":
        second["params"].append(first["params"].pop(0))
    elif how == "added":
        second["params"].append(nn.Parameter(torch.ones(1)))
    elif how == "a group less":
        del optimizer.param_groups[1]
    else:
        optimizer.param_groups = [{**first, "params": first["params"][:1]}, second]


ERRORS = {
    "taken out": r"parameter group 0 of the optimizer has lost parameter 0\.weight: .*requires_grad_\(False\)",
    "moved": r"parameter group 0 of the optimizer has lost parameter 0\.weight: .*make a torch optimizer with them",
    "added": "parameter group 1 of the optimizer has got another parameter",
    "a group less": "the optimizer had 2 parameter groups and has 1 now",
    "replaced": r"parameter group 0 of the optimizer has lost parameter 0\.bias",
}


def changed(how: str, between: bool) -> str:
    """`between`: backward and step(), otherwise before backward, which then updates nothing."""
    model, optimizer = pair()[0]
    backward(model, optimizer, 0)
    if not between:
        optimizer.step()
    before = parameters_digest(model)
    change(optimizer, how)
    noticed_in_step = between or how == "replaced"
    with pytest.raises(InvalidArgument) as caught:
        optimizer.step() if noticed_in_step else backward(model, optimizer, 1)
    assert parameters_digest(model) == before
    return str(caught.value)


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("how", ERRORS)
def test_changed_groups_are_an_error(how: str, between: bool) -> None:
    for text in workers.run(2, changed, how, between):
        assert re.search(ERRORS[how], text), text


def what_the_error_advises() -> str:
    """A list in another order is no change; a frozen parameter stays; a later optimizer may have other groups."""
    (model, optimizer), (other, reference) = pair()
    for step in range(6):
        for part, stepping in ((model, optimizer), (other, reference)):
            if step == 2:
                stepping.param_groups[0]["params"] = stepping.param_groups[0]["params"][::-1]
                next(part.parameters()).requires_grad_(False)
            backward(part, stepping, step)
            stepping.step()
        assert_same_bits(model, other, step)
    params = [list(part.parameters())[2:] for part in (model, other)]
    inner, reference = (SGD([{"params": some[:1]}, {"params": some[1:], "lr": 0.1}], lr=0.0) for some in params)
    later = poseidon.DistributedOptimizer(inner, model, update="server")
    for step in range(3):
        for part, stepping in ((model, later), (other, reference)):
            part.zero_grad()
            backward(part, stepping, step)
            stepping.step()
        assert_same_bits(model, other, step)
    return parameters_digest(model)


def test_what_the_error_advises() -> None:
    assert all_equal(workers.run(2, what_the_error_advises))
