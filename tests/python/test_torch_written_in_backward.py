"""Programs that reach gradients under way from hooks of later parameters, past the version counter.

Whoever reads `.grad` there gets the mean, and what is written to it counts. Other ways are errors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import poseidon.torch as poseidon
import workers
from overlap_cases import Model
from poseidon.errors import PoseidonError
from poseidon.torch.exchange.pending_exchange import PendingExchange
from poseidon.torch.tensors.pending_gradient import PendingGradient
from poseidon.torch.tensors.watched import raw_grad
from torch_cases import all_equal, parameters_digest

WIDTH = 700  # large enough to travel alone
ROWS = 4
Write = Callable[[nn.Parameter, dict[str, Any]], None]
"""What the hook of the first layer's weight does to the last layer's, given what the program has kept."""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
    )


def batch(rank: int) -> torch.Tensor:
    return torch.randn((ROWS, WIDTH), generator=torch.Generator().manual_seed(rank))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def model_of(module: nn.Module, how: str, scheme: str = "ps") -> tuple[Any, Any]:
    model = Model(module, scheme=scheme)
    optimizer: Any = sgd(module.parameters())
    if how != "plain":
        optimizer = poseidon.DistributedOptimizer(optimizer, model, update=how)
    return model, optimizer


# By `.grad`: the write counts.


def by_data(param: nn.Parameter, _: dict[str, Any]) -> None:
    param.grad.data.mul_(2)


def by_numpy(param: nn.Parameter, _: dict[str, Any]) -> None:
    array = param.grad.numpy()
    array *= 2


def by_torch(param: nn.Parameter, _: dict[str, Any]) -> None:
    param.grad.mul_(2)


def by_a_replacement(param: nn.Parameter, _: dict[str, Any]) -> None:
    param.grad = 2 * param.grad


def reference(steps: int) -> nn.Module:
    """One process that does the work of all ranks."""
    module, ranks = net(), range(poseidon.world_size())
    optimizer = sgd(module.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        for rank in ranks:
            (module(batch(rank)).square().mean() / len(ranks)).backward()
        module[4].weight.grad.mul_(2)
        optimizer.step()
    return module


def counted(write: Write, how: str, scheme: str) -> str:
    module = net()
    model, optimizer = model_of(module, how, scheme)
    module[0].weight.register_hook(lambda _: write(module[4].weight, {}))
    for _ in range(3):
        optimizer.zero_grad()
        model(batch(poseidon.rank())).square().mean().backward()
        optimizer.step()
    for found, expected in zip(module.parameters(), reference(3).parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    return parameters_digest(module)


@pytest.mark.parametrize("scheme", ["ps", "sfb"])
@pytest.mark.parametrize("how", ["plain", "worker"])
@pytest.mark.parametrize("write", [by_data, by_numpy, by_torch, by_a_replacement])
def test_a_write_by_way_of_the_parameter_counts(write: Write, how: str, scheme: str) -> None:
    assert all_equal(workers.run(2, counted, write, how, scheme))


def read_in_a_hook() -> list[float]:
    """The hook of a module that only reads sees the mean, once and again."""
    module, seen = net(), []
    model, optimizer = model_of(module, "plain")
    module[2].register_full_backward_hook(lambda *_: seen.append(module[4].weight.grad.norm().item()))
    for _ in range(3):
        optimizer.zero_grad()
        model(batch(poseidon.rank())).square().mean().backward()
        assert seen[-1] == module[4].weight.grad.norm().item()
        assert type(raw_grad(module[4].weight)) is torch.Tensor
        optimizer.step()
    return seen


def test_a_gradient_that_is_read_in_backward_is_the_mean() -> None:
    assert all_equal(workers.run(2, read_in_a_hook))


# Past `.grad`, or in its place.


def by_a_kept_reference(_: nn.Parameter, kept: dict[str, Any]) -> None:
    kept["gradient"].data.mul_(2)


def by_a_kept_array(_: nn.Parameter, kept: dict[str, Any]) -> None:
    kept["array"][3] += 1.0


def by_a_kept_view(_: nn.Parameter, kept: dict[str, Any]) -> None:
    kept["view"].data[:, 5].zero_()


def replaced(param: nn.Parameter, _: dict[str, Any]) -> None:
    param.grad = torch.ones(WIDTH, WIDTH)


def cleared(param: nn.Parameter, _: dict[str, Any]) -> None:
    param.grad = None


def refused(write: Write, how: str) -> str:
    module = net()
    model, optimizer = model_of(module, how)
    last, kept = module[4].weight, dict[str, Any]()
    for step in range(2):
        optimizer.zero_grad(set_to_none=False)
        if step:
            module[0].weight.register_hook(lambda _: write(last, kept))
        try:
            model(batch(poseidon.rank())).square().mean().backward()
        except PoseidonError as error:
            assert step
            return str(error)
        optimizer.step()
        if write is by_a_kept_reference:
            kept["gradient"] = last.grad.detach() if how == "plain" else last.grad.view_as(last)
        elif write is by_a_kept_array:
            kept["array"] = last.grad.numpy()
        elif write is by_a_kept_view:
            kept["view"] = last.grad[7:]
    return ""


@pytest.mark.parametrize("how", ["plain", "worker", "server"])
@pytest.mark.parametrize("write", [by_a_kept_reference, by_a_kept_array, by_a_kept_view, replaced, cleared])
def test_other_writes_are_errors(write: Write, how: str) -> None:
    for said in workers.run(2, refused, write, how):
        assert "the gradient of 4.weight was " in said
        assert "while it was exchanged: change gradients after backward()" in said


def used_where_servers_update() -> str:
    module = net()
    model, _ = model_of(module, "server")
    module[0].weight.register_hook(lambda _: by_data(module[4].weight, {}))
    with pytest.raises(PoseidonError) as caught:
        model(batch(poseidon.rank())).square().mean().backward()
    return str(caught.value)


def test_a_gradient_that_servers_have_got_is_not_written_to() -> None:
    for said in workers.run(2, used_where_servers_update):
        assert "the gradient of 4.weight was used while it was exchanged" in said


# What others do not reach is sent from its own memory, as before.


def kinds_of_exchange(set_to_none: bool) -> list[tuple[str, bool, bool]]:
    module, seen = net(), list[tuple[str, bool, bool]]()
    model, optimizer = model_of(module, "plain")
    note = PendingExchange.stand_aside

    def noted(pending: PendingExchange, stand_in: PendingGradient) -> None:
        note(pending, stand_in)
        seen.append((pending.entry.name, pending.in_place, raw_grad(pending.entry.param) is stand_in))

    PendingExchange.stand_aside = noted
    try:
        for _ in range(2):
            seen.clear()
            optimizer.zero_grad(set_to_none=set_to_none)
            model(batch(poseidon.rank())).square().mean().backward()
            optimizer.step()
    finally:
        PendingExchange.stand_aside = note
    assert all(type(raw_grad(param)) is torch.Tensor for param in module.parameters())
    return seen


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_only_their_parameters_reach_are_not_copied(set_to_none: bool) -> None:
    for seen in workers.run(2, kinds_of_exchange, set_to_none):
        assert [name for name, *_ in seen if "weight" in name] == ["4.weight", "2.weight", "0.weight"]
        assert all(in_place and stands for _, in_place, stands in seen)


def failed_half_way() -> list[bool]:
    """No stand-in is left behind."""
    poseidon.init()
    module = net()
    model, _ = model_of(module, "plain")

    def fail(_: torch.Tensor) -> None:
        raise ValueError("of the program")

    module[0].weight.register_hook(fail)
    with pytest.raises(ValueError, match="of the program"):
        model(batch(poseidon.rank())).square().mean().backward()
    grads = [raw_grad(param) for param in module.parameters()]
    assert copy.deepcopy(grads[4]) is not None
    return [type(grad) is PendingGradient for grad in grads]


def test_a_backward_that_fails_leaves_gradients() -> None:
    for stand_ins in workers.run_fresh(2, failed_half_way):
        assert not any(stand_ins)
