"""Who else trains a model's parameters: other wrappers of them, and optimizers that average them."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from typing import Protocol

from torch import nn

from poseidon.adapter.control import Control
from poseidon.adapter.features import Features
from poseidon.errors import InvalidArgument, PoseidonError
from poseidon.torch.exchange.synchronizer import Synchronizer
from poseidon.torch.model.parameters import SyncedParameter
from poseidon.torch.process.context import memberships


class Averages(Protocol):
    """An optimizer that averages the parameters of its model over the ranks."""

    model: nn.Module


_AVERAGES: weakref.WeakSet[Averages] = weakref.WeakSet()


def note_averages(one: Averages) -> None:
    """From now on, as long as the program keeps it, this one averages the parameters of its model."""
    _AVERAGES.add(one)


class OtherTrainers:
    """The others of one model that is being wrapped, as this rank sees them.

    What the program has dropped may live on until Python's garbage collector finds it, on one rank and not on another.
    So the collector looks before anybody is taken for another trainer, and `agree` makes all ranks do the same.
    """

    def __init__(self, module: nn.Module, entries: list[SyncedParameter]) -> None:
        self._entries = entries
        self._averaged = _is_averaged(entries)
        self._refusal = ""
        _forget_dropped(entries)
        try:
            take_over(module, entries)
        except InvalidArgument as error:
            self._refusal = str(error)

    def agree(self, control: Control) -> None:
        """Collective: what some rank shares with another model all do. Raises the same InvalidArgument on all ranks."""
        shared = sum(entry.shared for entry in self._entries)
        shared, refused, averaged = control.sum([shared, int(bool(self._refusal)), int(self._averaged)])
        if averaged:
            Features.refuse("wrapped", "local_sgd")
        if refused:
            texts = control.texts_if_different(self._refusal) or [self._refusal]
            raise InvalidArgument(next(filter(None, texts)))
        if shared:
            counts = control.sum([int(entry.shared) for entry in self._entries])
            for entry, ranks in zip(self._entries, counts, strict=True):
                if ranks and not entry.shared:
                    entry.share()


def check_alone(entries: list[SyncedParameter]) -> None:
    """Raises InvalidArgument, with one worker, for what `OtherTrainers` refuses with several."""
    if _is_averaged(entries):
        Features.refuse("wrapped", "local_sgd")


def take_over(module: nn.Module, entries: list[SyncedParameter]) -> None:
    """A module, or one with the very same parameters, that is wrapped again: of its wrappers one exchanges at a time.

    When it was wrapped before it may have had other parameters, such as frozen ones. Of other models, the parameters
    that they have, too, are exchanged by each, from memory of its own.
    """
    mine = {entry.whole: entry for entry in entries}
    for sync in _synchronizers():
        common = _common(sync, entries)
        again = common and sync.module() is plain(module)
        if again or len(common) == len(sync.entries) == len(entries):
            if not sync.retired:
                sync.retire()
            continue
        for other in common:
            other.share()
            mine[other.whole].share()


def plain(module: nn.Module) -> nn.Module:
    """The module itself, of one that torch.compile has made."""
    inner = getattr(module, "_orig_mod", module)
    return inner if isinstance(inner, nn.Module) else module


def is_synced(param: nn.Parameter) -> bool:
    """Whether some wrapped model exchanges the parameter's gradients."""
    return any(entry.whole is param for sync in _synchronizers() if not sync.retired for entry in sync.entries)


def _forget_dropped(entries: list[SyncedParameter]) -> None:
    """Of what the program has dropped no wrapper of these parameters is left. What is in flight would keep it."""
    if _settle_others(entries):
        gc.collect()


def _settle_others(entries: list[SyncedParameter]) -> bool:
    """Whether there are others."""
    others = [sync for sync in _synchronizers() if _common(sync, entries)]
    for sync in others:
        with suppress(PoseidonError):  # which whoever uses its parameters is told
            sync.settle()
    return bool(others)


def _common(sync: Synchronizer, entries: list[SyncedParameter]) -> list[SyncedParameter]:
    """The parameters of another model that are among these, too."""
    mine = {entry.whole: entry for entry in entries}
    return [entry for entry in sync.entries if entry.whole in mine and entry is not mine[entry.whole]]


def _synchronizers() -> list[Synchronizer]:
    """Of all models that are trained in this process's jobs."""
    return [one for here in memberships() for one in here.in_flight if isinstance(one, Synchronizer)]


def _is_averaged(entries: list[SyncedParameter]) -> bool:
    """Whether an optimizer that the program has not dropped averages one of these."""
    params = {entry.whole for entry in entries}

    def found() -> bool:
        return any(param in params for one in _AVERAGES for param in one.model.parameters())

    if found():
        gc.collect()
    return found()
