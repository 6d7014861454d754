"""Updates that wait for their gradients: what cannot be exact is an error that says what to do."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer

import poseidon.torch as poseidon
import workers
from overlap_cases import Model, assert_same_training, own_batch, train_step, wrapped
from poseidon.torch.tensors.watched import raw_grad
from torch_cases import all_equal, mean_loss, mlp, parameters_digest
from waiting import wait_for


def momentum(params: Any) -> Optimizer:
    return SGD(params, lr=0.05, momentum=0.9)


def refused() -> None:
    model = Model(mlp())
    params = list(model.parameters())

    def check(make: Callable[[], Optimizer], text: str, **options: Any) -> None:
        state = torch.get_rng_state()
        with pytest.raises(poseidon.PoseidonError, match=text):
            poseidon.DistributedOptimizer(make(), model, **options)
        assert torch.equal(torch.get_rng_state(), state)

    check(lambda: LBFGS(params), "LBFGS exclude each other: .*use the optimizer itself, without DistributedOptimizer")
    check(lambda: momentum([torch.ones(3, requires_grad=True)]), "synchronizes no parameter of the optimizer")
    check(lambda: momentum(params), "update is 'workers': pass 'worker'", update="workers")
    check(lambda: momentum(params), "max_norm is 0.0", max_norm=0.0)
    check(lambda: momentum(params), "clip is 'global': known are gathered and previous", max_norm=1.0, clip="global")
    check(
        lambda: momentum(params),
        "max_norm and update='server' exclude each other: .*use update='worker'",
        max_norm=1.0,
        update="server",
    )
    patched = momentum(params)
    patched.step = lambda: None  # type: ignore[method-assign,assignment]
    check(lambda: patched, "has a step\\(\\) of its own, .*: leave per_parameter out", per_parameter=True)
    with pytest.raises(poseidon.PoseidonError, match="not a Sequential"):
        poseidon.DistributedOptimizer(momentum(params), model.module)
    optimizer = poseidon.DistributedOptimizer(momentum(params[:2]), model)
    check(lambda: optimizer, "is a poseidon.DistributedOptimizer already: wrap the torch optimizer itself")
    with pytest.raises(poseidon.PoseidonError, match=r"save state_dict\(\)"):
        copy.deepcopy(optimizer)
    assert repr(optimizer).startswith("DistributedOptimizer(update='worker', SGD")


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_refused(world_size: int) -> None:
    workers.run(world_size, refused)


def different_optimizers() -> str:
    model = Model(mlp())
    lr = 0.1 * (1 + poseidon.rank())
    with pytest.raises(poseidon.PoseidonError) as caught:
        poseidon.DistributedOptimizer(SGD(model.parameters(), lr=lr), model)
    return str(caught.value)


def test_ranks_must_have_the_same_optimizer() -> None:
    for text in workers.run(2, different_optimizers):
        assert re.search("different optimizers: .*'lr': 0.1.*'lr': 0.2", text)


# Uses that cannot be exact.


def graph_from_before(model: Any, optimizer: Any) -> Callable[[], Any]:
    loss = mean_loss(model, *own_batch(0))
    mean_loss(model, *own_batch(1)).backward()
    optimizer.step()
    return loss.backward


def gradient_written_in_backward(model: Any, optimizer: Any) -> Callable[[], Any]:
    """By a hook of another layer, when the gradient is on its way already."""
    model.module[0].bias.register_hook(lambda _: (raw_grad(model.module[4].bias).mul_(2), None)[1])
    loss = mean_loss(model, *own_batch(0))
    return loss.backward


def inside_a_transform(model: Any, optimizer: Any) -> Callable[[], Any]:
    train_step(model, optimizer, 0)
    return lambda: torch.func.grad(lambda x: model.module(x).sum())(own_batch(1)[0])


MISUSES: list[tuple[Any, str]] = [
    (graph_from_before, "modified by an inplace operation|had perhaps not been made when the forward pass used it"),
    (
        gradient_written_in_backward,
        r"gradient of 4\.bias was used while.*change gradients after backward",
    ),
    (inside_a_transform, r"inside a torch\.func transform.*call synchronize\(\)"),
]


def misuse(name: str) -> str:
    wrong = next(begin for begin, _ in MISUSES if begin.__name__ == name)
    model, optimizer = wrapped(True, momentum)
    call = wrong(model, optimizer)
    with pytest.raises(RuntimeError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(("wrong", "text"), MISUSES)
def test_misuse_is_an_error(wrong: Any, text: str) -> None:
    for answer in workers.run(2, misuse, wrong.__name__):
        assert re.search(text, answer)


def after_synchronize() -> str:
    """What is refused above works once everything is in place."""

    def loop(model: Any, optimizer: Any) -> float:
        first = model.module[0]
        view = first.bias.view_as(first.bias)
        train_step(model, optimizer, 0)
        if isinstance(optimizer, poseidon.DistributedOptimizer):
            optimizer.synchronize()
        optimizer.zero_grad()
        (view * 2).sum().backward()
        train_step(model, optimizer, 1)
        if isinstance(optimizer, poseidon.DistributedOptimizer):
            optimizer.synchronize()
        grads = torch.func.grad(lambda x: model.module(x).sum())(own_batch(1)[0])
        return grads.sum().item()

    return assert_same_training(loop, momentum)


def test_after_synchronize_all_is_well() -> None:
    assert all_equal(workers.run(2, after_synchronize))


def failing_update() -> str:
    """An optimizer that fails between two layers: no parameter is used after half a step."""
    model, optimizer = wrapped(True, momentum)
    train_step(model, optimizer, 0)
    optimizer.synchronize()
    state = optimizer._inner.state[model.module[2].weight]
    state["momentum_buffer"] = torch.zeros(3)  # of another shape
    train_step_fails(model, optimizer)
    with pytest.raises(poseidon.PoseidonError, match="some parameters have made the step and some have not") as caught:
        model(own_batch(2)[0])
    return str(caught.value)


def train_step_fails(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    mean_loss(model, *own_batch(1)).backward()
    optimizer.step()
    # By itself, or because the other rank has failed first and says so.
    with pytest.raises((RuntimeError, poseidon.PoseidonError), match=r"size|some parameters have made the step"):
        model(own_batch(2)[0])


def test_half_a_step_is_never_used() -> None:
    for text in workers.run_fresh(2, initialized, failing_update):
        assert "some parameters have made the step and some have not" in str(text)


def initialized(function: Any) -> Any:
    poseidon.init()
    return function()


def peer_leaves(kind: str, folder: Path) -> str:
    """Rank 1 ends in the middle of a step; rank 0 hears of it at the next parameter, not later."""
    poseidon.init()
    model, optimizer = wrapped(True, lambda params: AdamW(params, lr=0.01))
    train_step(model, optimizer, 0)
    train_step(model, optimizer, 1)
    before = parameters_digest(model)
    if poseidon.rank() == 1:
        wait_for(folder / "rank 0 has begun the step")
        raise SystemExit(3)
    mean_loss(model, *own_batch(2)).backward()
    optimizer.step()
    (folder / "rank 0 has begun the step").touch()
    use = model.module.state_dict if kind == "checkpoint" else lambda: model(own_batch(3)[0])
    with pytest.raises(poseidon.PoseidonError) as caught:
        use()
    with pytest.raises(poseidon.PoseidonError, match="start again from a checkpoint"):
        parameters_digest(model)
    assert before
    return str(caught.value)


@pytest.mark.parametrize("kind", ["forward", "checkpoint"])
def test_a_peer_that_leaves_is_an_error_at_the_next_use(kind: str, tmp_path: Path) -> None:
    # The comparison of replicas after step 2 would hear of it before.
    answers = workers.run_fresh(2, peer_leaves, kind, tmp_path, POSEIDON_REPLICA_CHECK="off")
    assert "rank 1" in answers[0]
