"""Updates that wait for their gradients, and uses of parameters that PyTorch does not dispatch: right, or an error."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

import poseidon.torch as poseidon
import workers
from overlap_cases import assert_same_training, own_batch, plain_loop, train_step, wrapped
from poseidon.torch.tensors.watched import without_torch_function
from torch_cases import all_equal, digest, mean_loss


def momentum(params: Any) -> Optimizer:
    return SGD(params, lr=0.05, momentum=0.9)


class Scale(torch.autograd.Function):
    """x · weight, as a compiled extension makes it: the weight's memory is read without a dispatch."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, saves: bool) -> torch.Tensor:
        with without_torch_function():
            values = weight.detach()
            ctx.save_for_backward(x, *([weight] if saves else []))
            ctx.values = values.clone()
            return x * values

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, *saved = ctx.saved_tensors
        return grad * (saved[0] if saved else ctx.values), (grad * x).sum(0), None


class Shift(torch.autograd.Function):
    """Does not read its weight; backward does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, saves: bool) -> torch.Tensor:
        if saves:
            ctx.save_for_backward(weight)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (weight,) = ctx.saved_tensors or (torch.ones(48),)
        return grad * weight, grad.sum(0) * weight, None


class Part(nn.Module):
    """Has a parameter, and uses it itself unless its parent does."""

    def __init__(self, function: Any, saves: bool) -> None:
        super().__init__()
        self.function, self.saves = function, saves
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function.apply(x, self.weight, self.saves)


class Unseen(nn.Module):
    """`first` and `middle` travel with the biases. `kept`: `first` is used through a reference from the beginning."""

    def __init__(self, function: Any = Scale, saves: bool = False, how: str = "own") -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.middle = Part(function, saves), nn.Linear(48, 40)
        self.last = nn.Linear(40, 4)
        self.how = how
        self.kept = [self.first.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "own":
            x = self.first(x)
        else:
            weight = self.first.weight if self.how == "taken" else self.kept[0]
            x = self.first.function.apply(x, weight, self.first.saves)
        return self.last(torch.tanh(self.middle(x)))


def same_bits(function: Any, saves: bool, how: str, update: str, scheme: str) -> str:
    return assert_same_training(
        plain_loop, momentum, lambda: Unseen(function, saves, how), update=update, scheme=scheme
    )


@pytest.mark.parametrize(
    ("small_bytes", "update", "scheme"), [(0, "worker", "auto"), (1 << 15, "worker", "auto"), (0, "server", "ps")]
)
@pytest.mark.parametrize("how", ["own", "taken"])
def test_functions_get_updated_parameters(how: str, small_bytes: int, update: str, scheme: str) -> None:
    for function, saves in ((Scale, False), (Scale, True), (Shift, False), (Shift, True)):
        assert all_equal(workers.run(2, same_bits, function, saves, how, update, scheme, small_bytes=small_bytes))


# Through references that were kept from before.


def through_the_wrapper(model: Any, optimizer: Any) -> Callable[[], Any]:
    return mean_loss(model, *own_batch(1)).backward


def past_the_wrapper(model: Any, optimizer: Any) -> Callable[[], Any]:
    return mean_loss(model.module, *own_batch(1)).backward


def with_an_evaluation_before_backward(model: Any, optimizer: Any) -> Callable[[], Any]:
    loss = mean_loss(model, *own_batch(1))
    with torch.no_grad():
        model(own_batch(2)[0])
    return loss.backward


def with_gradients_read_before_backward(model: Any, optimizer: Any) -> Callable[[], Any]:
    loss = mean_loss(model, *own_batch(1))
    assert all(param.grad.isfinite().all() for param in model.parameters())
    return loss.backward


def with_a_graph_of_its_own(model: Any, optimizer: Any) -> Callable[[], Any]:
    """Another backward comes before its own."""
    loss = mean_loss(model, *own_batch(1))
    model.module.last(torch.ones(1, 40)).sum().backward()
    return loss.backward


def under_no_sync(model: Any, optimizer: Any) -> Callable[[], Any]:
    with model.no_sync():
        return mean_loss(model, *own_batch(1)).backward


MISSED: list[Any] = [
    through_the_wrapper,
    past_the_wrapper,
    with_an_evaluation_before_backward,
    with_gradients_read_before_backward,
    with_a_graph_of_its_own,
    under_no_sync,
]


def missed(name: str, update: str) -> str:
    begin = next(one for one in MISSED if one.__name__ == name)
    model, optimizer = wrapped(True, momentum, Unseen(how="kept"), update=update)
    inputs, targets = own_batch(0)
    mean_loss(model, inputs, targets).backward()
    optimizer.step()
    call = begin(model, optimizer)
    with pytest.raises((poseidon.PoseidonError, RuntimeError)) as caught:
        call()
    return str(caught.value)


# As updates of servers change parameters in place, autograd may notice first.
NOTICED = r"parameter first\.weight got a gradient.*call synchronize\(\) of the Distr"
BY_AUTOGRAD = r"modified by an inplace operation"


@pytest.mark.parametrize("update", ["worker", "server"])
@pytest.mark.parametrize("begin", MISSED)
def test_a_use_that_nobody_sees_is_an_error(begin: Any, update: str) -> None:
    found = BY_AUTOGRAD if update == "server" and begin is with_a_graph_of_its_own else NOTICED
    for text in workers.run_fresh(2, initialized, missed, begin.__name__, update):
        assert re.search(found, str(text)), text


def initialized(function: Any, *args: Any) -> Any:
    poseidon.init()
    return function(*args)


def after_synchronize() -> str:
    def loop(model: Any, optimizer: Any) -> list[float]:
        losses = []
        for step in range(5):
            losses.append(train_step(model, optimizer, step))
            with torch.no_grad():
                losses.append(sum(param.sum().item() for param in list(model.parameters())[1:]))
            if isinstance(optimizer, poseidon.DistributedOptimizer):
                optimizer.synchronize()
        return losses

    return " ".join(assert_same_training(loop, momentum, lambda kind=kind: Unseen(*kind, "kept")) for kind in KINDS)


KINDS = [(Scale, False), (Scale, True), (Shift, False)]


def test_after_synchronize_kept_references_are_right() -> None:
    assert all_equal(workers.run(2, after_synchronize, small_bytes=1 << 15))


# The tables of modules in which the parameters are found by name.


def tables() -> str:
    """They are the modules' own again once everything has been used; copies and files never have others."""
    model, optimizer = wrapped(True, momentum, Unseen())
    own = {name: part._parameters for name, part in model.module.named_modules()}
    usual = type(own[""])
    train_step(model, optimizer, 0)
    assert {type(part._parameters) is usual for part in model.module.modules()} == {True, False}
    model.module.middle.bias = nn.Parameter(torch.zeros(40), requires_grad=False)
    copied = copy.deepcopy(model.module.first)
    train_step(model, optimizer, 1)
    file = io.BytesIO()
    torch.save(model.module.last, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(copied._parameters) is type(loaded._parameters) is usual
    assert digest([loaded.weight]) == digest([model.module.last.weight])
    optimizer.synchronize()
    for name, part in model.module.named_modules():
        assert part._parameters is own[name], name
    assert model.module.middle.bias.sum() == 0
    return digest(model.module.parameters())


def test_modules_keep_their_tables() -> None:
    assert all_equal(workers.run(2, tables, small_bytes=1 << 15))


# Forward passes that go past the wrapper.


def trained_past_the_wrapper(update: str) -> str:
    model, optimizer = wrapped(True, momentum, scheme="ps", update=update)
    train_step(model, optimizer, 0)
    optimizer.zero_grad()
    mean_loss(model.module, *own_batch(1)).backward()  # its gradients stay this rank's, as with torch's class
    with pytest.raises(poseidon.PoseidonError) as caught:
        optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize(
    ("update", "words"), [("worker", "went past the wrapper"), ("server", "without a synchronizing backward")]
)
def test_a_step_with_gradients_of_one_rank_is_an_error(update: str, words: str) -> None:
    for text in workers.run(2, trained_past_the_wrapper, update):
        assert words in text


def looked_at_past_the_wrapper(update: str) -> str:
    """One rank alone asks for gradients in between, and clears them."""
    model, optimizer = wrapped(True, momentum, scheme="ps", update=update)
    for step in range(3):
        train_step(model, optimizer, step)
        if poseidon.rank() == 0:
            mean_loss(model.module, *own_batch(step)).backward()
        optimizer.zero_grad()
    return digest(model.parameters())


@pytest.mark.parametrize("update", ["worker", "server"])
def test_one_rank_may_look_at_gradients_alone(update: str) -> None:
    assert all_equal(workers.run(2, looked_at_past_the_wrapper, update))
