"""Optimizers of the program's own whose steps the exchange has to know of."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from poseidon.errors import InvalidArgument
from poseidon.torch.exchange.synchronizer import Synchronizer
from poseidon.torch.model.parameters import SyncedParameter

_watchers: weakref.WeakSet[EmptySteps] = weakref.WeakSet()
_registered: list[Any] = []


class EmptySteps:
    """Watches the steps of all optimizers that have parameters of one model.

    A loss on one rank may have nothing to do with the model: a fresh zero for a batch that is left out. No hook of a
    parameter then runs, and this rank's next exchange would meet the one that the others are in. So it takes part in
    theirs when the optimizer's step() is called, with nothing to contribute, which is what a gradient of zeros means.

    `paused`: whether ranks make different steps at the moment, which others take care of.
    """

    def __init__(self, sync: Synchronizer, rank: int, paused: Callable[[], bool]) -> None:
        self._sync = weakref.ref(sync)
        self._rank, self._paused = rank, paused
        self._params = {entry.whole for entry in sync.entries}
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
        if sync is None or sync.is_void or not sync.layers.connected or sync.retired or self._paused():
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


class OptimizersInBackward:
    """Optimizers that torch's `_apply_optimizer_in_backward` has given to parameters.

    By themselves they would update with this rank's own gradient as soon as it exists. This takes their hooks away, and
    makes their steps when the exchange is over. Without any it does nothing.
    """

    def __init__(self, entries: Sequence[SyncedParameter]) -> None:
        self._params = [entry.whole for entry in entries if hasattr(entry.whole, "_in_backward_optimizers")]
        if not self._params:
            return
        taken = next((entry.name for entry in entries if entry.updater is not None or entry.on_servers), None)
        if taken is not None:
            raise InvalidArgument(
                f"parameter {taken} has a DistributedOptimizer, and others have an optimizer that runs in backward "
                "(_apply_optimizer_in_backward): use one of the two for the model"
            )
        from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

        for param in self._params:
            for handle in param_to_optim_hook_handle_map.get(param, []):
                handle.remove()

    def step(self) -> None:
        """Updates the parameters, whose gradients are now the mean over the ranks; as torch does, clears those."""
        for param in self._params:
            if param.grad is None:
                continue
            with torch.no_grad():
                for optimizer in param._in_backward_optimizers:  # type: ignore[attr-defined]
                    optimizer.step()
            param.grad = None
