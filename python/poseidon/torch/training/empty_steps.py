"""Steps of an optimizer whose backward pass has reached no parameter of a wrapped model.

A loss on one rank may have nothing to do with the model: a fresh zero for a batch that is left out. No hook of a
parameter then runs, and this rank's next exchange would meet the one that the others are in. So it takes part in theirs
when the optimizer's step() is called, with nothing to contribute, which is what a gradient of zeros means.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from poseidon.torch.exchange.synchronizer import Synchronizer

_watchers: weakref.WeakSet[EmptySteps] = weakref.WeakSet()
_registered: list[Any] = []


class EmptySteps:
    """Watches the steps of all optimizers that have parameters of one model.

    `paused`: whether ranks make different steps at the moment, which others take care of.
    """

    def __init__(self, sync: Synchronizer, rank: int, paused: Callable[[], bool]) -> None:
        self._sync = weakref.ref(sync)
        self._rank, self._paused = rank, paused
        self._params = {entry.param for entry in sync.entries}
        self._seen: weakref.WeakKeyDictionary[Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )  # exchanges at its last step
        self._told = False
        _watchers.add(self)
        if not _registered:
            _registered.append(register_optimizer_step_pre_hook(_before_step))

    def before(self, optimizer: Optimizer) -> None:
        """Takes part in an exchange that this rank would miss: step() of some optimizer begins."""
        sync = self._sync()
        if sync is None or not sync.layers.connected or sync.retired or self._paused():
            return
        sync.check_ended()
        count = sync.passes.exchange_count
        if self._seen.get(optimizer, 0) == count and sync.passes.awaits_exchange and self._trains_some(optimizer):
            self._tell(optimizer)
            sync.exchange_nothing()
        self._seen[optimizer] = sync.passes.exchange_count

    def _trains_some(self, optimizer: Optimizer) -> bool:
        groups = optimizer.param_groups
        if all("lr" in group and float(group["lr"] or 0) == 0 for group in groups):
            return False  # torch's distributed checkpoints call it so, perhaps on one rank, to make state
        return any(param in self._params for group in groups for param in group["params"])

    def _tell(self, optimizer: Optimizer) -> None:
        if self._told:
            return
        self._told = True
        warnings.warn(
            f"rank {self._rank}: step() of {type(optimizer).__name__} followed a forward pass of the model, and no "
            "backward pass reached a parameter in between; this rank takes part in the step with gradients of zeros. "
            "If that is not meant, make the loss of the model's output on every rank, or call step() on none",
            stacklevel=5,
        )


def _before_step(optimizer: Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    closure = keywords.get("closure", arguments[1] if len(arguments) > 1 else None)  # the first is the optimizer
    if torch.compiler.is_compiling() or closure is not None:  # whose backward passes are still to come
        return
    for watcher in list(_watchers):
        watcher.before(optimizer)
