"""Runs a torch optimizer on some of its parameters at a time, with the arithmetic of its own step()."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from poseidon.errors import PoseidonError
from poseidon.torch.optimizer.known import INSTEAD
from poseidon.torch.optimizer.wrapper import NO_HYPERPARAMETERS, STEP_HOOKS

Hyperparameters = list[dict[str, Any]]
"""What each parameter group says beside its parameters."""

_HOOKS_OF_ALL: tuple[dict[int, Any], ...] = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)


def hyperparameters_of(optimizer: Optimizer) -> Hyperparameters:
    """Those of all groups as they are now; later changes, also of tensors, have no effect on them."""
    return [
        {key: _snapshot(value) for key, value in group.items() if key not in NO_HYPERPARAMETERS}
        for group in optimizer.param_groups
    ]


def partial_step(
    optimizer: Optimizer, hyperparameters: Hyperparameters, params: Sequence[Sequence[torch.Tensor]]
) -> None:
    """The step of `params` (those of each group), which have gradients, without the optimizer's hooks."""
    groups = [{**values, "params": list(chosen)} for values, chosen in zip(hyperparameters, params, strict=True)]
    before = optimizer.param_groups
    optimizer.param_groups = groups
    try:
        plain_step(optimizer)
    finally:
        optimizer.param_groups = before
    for values, group in zip(hyperparameters, groups, strict=True):
        changed = [key for key in group if key != "params" and values.get(key) is not group[key]]
        if changed:
            raise PoseidonError(
                f"{type(optimizer).__name__} keeps {', '.join(changed)} of its parameter groups from step to step, "
                f"which cannot be done layer by layer: {INSTEAD}"
            )


def _snapshot(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return tuple(map(_snapshot, value)) if isinstance(value, tuple) else value


def plain_step(optimizer: Optimizer) -> None:
    """The class's step() without the optimizer's hooks, also where it calls the step() of its parent class."""
    with without_hooks(optimizer), torch.no_grad():
        _unhooked(type(optimizer).step)(optimizer)


def whole_step(optimizer: Optimizer, *arguments: Any) -> Any:
    """Runs step() as a program would call it, but without the optimizer's hooks, which somebody else runs."""
    with without_hooks(optimizer):
        if "step" in vars(optimizer):
            return optimizer.step(*arguments)
        return _unhooked(type(optimizer).step)(optimizer, *arguments)


def _unhooked(step: Any) -> Any:
    # Around step() torch puts a function that runs hooks and labels profiles, too slow for a part of a step.
    return step.__wrapped__ if getattr(step, "hooked", False) else step


@contextmanager
def without_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Within it, step() runs no hooks of this optimizer, nor those of all optimizers.

    Where a subclass's step() calls that of its parent class, torch would run them again, in every part of a step.
    """
    of_all = [(hooks, dict(hooks)) for hooks in _HOOKS_OF_ALL if hooks]
    for registered, _ in of_all:
        registered.clear()
    hooks = {name: getattr(optimizer, name) for name in STEP_HOOKS if getattr(optimizer, name)}
    for name in hooks:
        setattr(optimizer, name, {})
    try:
        yield
    finally:
        for name, before in hooks.items():
            setattr(optimizer, name, before)
        for registered, kept in of_all:
            registered.update(kept)
