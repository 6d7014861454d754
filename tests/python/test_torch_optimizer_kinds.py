"""Which optimizers update layer by layer, and that all others train as without DistributedOptimizer."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import poseidon.torch as poseidon
import workers
from optimizer_kinds import NOT_PER_PARAMETER, Momentum, Signed, SlowWeights
from overlap_cases import Model, assert_same_training, own_batch, plain_loop, wrapped
from torch_cases import all_equal, mean_loss, mlp, parameters_digest


def loop_with_a_bad_step(model: Any, optimizer: Any) -> list[float]:
    losses = []
    for step in range(9):
        optimizer.zero_grad()
        loss = mean_loss(model, *own_batch(step))
        if step == 4:
            loss = loss + float("nan") * next(iter(model.parameters())).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[:4] + losses[5:]


def closure_loop(model: Any, optimizer: Any) -> list[Any]:
    """Each step evaluates its closure twice, as sharpness-aware optimizers do."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = mean_loss(model, *own_batch(0))
        loss.backward()
        return loss

    return [float(optimizer.step(closure)) for _ in range(3)]


class TwoPasses(Momentum):
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            moved = [(param, param.grad.clone().mul_(0.05)) for param in self.with_gradient()]
            for param, by in moved:
                param.add_(by)
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            for param, by in moved:
                param.sub_(by)
        super().step()
        return loss


def every_kind() -> list[str]:
    digests = []
    for make in NOT_PER_PARAMETER:
        loop = loop_with_a_bad_step if make.__name__ == "SkipsBad" else plain_loop
        digests.append(assert_same_training(loop, make))
        assert not wrapped(True, make)[1].per_parameter
    return [*digests, assert_same_training(closure_loop, TwoPasses)]


def test_optimizers_that_need_all_gradients_train_as_without_it() -> None:
    assert all_equal(workers.run(2, every_kind))


def hooks(params: Any) -> Optimizer:
    """A known class whose hooks look at all gradients and parameters."""
    optimizer = SGD(params, lr=0.05, momentum=0.9)
    every = [param for group in optimizer.param_groups for param in group["params"]]
    optimizer.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_norm_(every, 0.05) and None)
    optimizer.register_step_post_hook(lambda *_: torch._foreach_mul_([param.data for param in every], 0.99))
    return optimizer


def known_or_said() -> list[str]:
    for make in (hooks, SGD, Adam, AdamW, lambda params: Adam(params, foreach=True, maximize=True)):
        assert wrapped(True, make)[1].per_parameter
    assert not wrapped(True, lambda params: Adam(params, differentiable=True))[1].per_parameter
    with_scheduler = SGD(mlp().parameters(), lr=0.1)
    torch.optim.lr_scheduler.ExponentialLR(with_scheduler, 0.9)
    model = Model(mlp())
    with_scheduler.param_groups[0]["params"] = list(model.parameters())
    assert poseidon.DistributedOptimizer(with_scheduler, model).per_parameter
    assert not wrapped(True, Signed)[1].per_parameter
    said = wrapped(True, Signed, per_parameter=True)[1]
    assert said.per_parameter
    return [assert_same_training(plain_loop, hooks), assert_same_training(plain_loop, Signed, per_parameter=True)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_known_class_or_the_users_word_updates_layer_by_layer(world_size: int) -> None:
    assert all_equal(workers.run(world_size, known_or_said))


class Derived(SGD):
    """Its step() calls that of its parent class, around which torch runs the hooks of all optimizers."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def derived() -> str:
    SGD(mlp().parameters(), lr=0.1)  # torch puts its function around a class's step() when it makes the first object
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return assert_same_training(
            plain_loop, lambda params: Derived(params, lr=0.05, momentum=0.9), per_parameter=True
        )


def test_parts_of_a_step_run_no_hooks_of_a_parent_class() -> None:
    """Such a hook would take them for the step that follows a forward pass without a backward pass."""
    assert all_equal(workers.run(2, derived))


def patched_class() -> None:
    """Somebody has replaced the step() of torch's class: it is not the one that is known any more."""
    plain = SGD.step

    def step(self: SGD, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.05)
        return plain(self, closure)

    SGD.step = step  # type: ignore[method-assign]
    try:
        assert not wrapped(True, lambda params: SGD(params, lr=0.05))[1].per_parameter
        assert_same_training(plain_loop, lambda params: SGD(params, lr=0.05))
    finally:
        SGD.step = plain  # type: ignore[method-assign]


def state_and_groups() -> str:
    """What such an optimizer has of its own stays reachable: its attributes, its state, groups that come later."""
    model, optimizer = wrapped(True, SlowWeights, nn.Sequential(mlp(), nn.Linear(4, 4)))
    plain_loop(model, optimizer, 3)
    assert optimizer.count == 3
    assert not hasattr(optimizer, "nothing")
    saved = optimizer.state_dict()
    assert "slow" in saved["state"][0]
    plain_loop(model, optimizer, 2)
    optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["state"].keys() == saved["state"].keys()
    sparse = Model(nn.Sequential(nn.Embedding(4, 4, sparse=True)))
    with pytest.raises(poseidon.PoseidonError, match=r"max_norm and .* exclude each other"):
        poseidon.DistributedOptimizer(SlowWeights(sparse.parameters()), sparse, max_norm=1.0)
    clipped = [
        assert_same_training(clipping_loop, SlowWeights, max_norm=0.05),
        assert_same_training(clipping_loop, Momentum, max_norm=0.05),
    ]
    return parameters_digest(model) + " ".join(clipped)


def clipping_loop(model: Any, optimizer: Any) -> list[float]:
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = mean_loss(model, *own_batch(step))
        loss.backward()
        if not isinstance(optimizer, poseidon.DistributedOptimizer):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        losses.append(loss.item())
    return losses


def more_of_them() -> str:
    patched_class()
    return state_and_groups()


def test_a_patched_class_and_an_optimizer_with_state_of_its_own() -> None:
    assert all_equal(workers.run(2, more_of_them))
