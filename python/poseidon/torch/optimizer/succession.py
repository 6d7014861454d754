"""One DistributedOptimizer after another for the same model: Adam, then SGD; the head, then all parameters.

The newer one takes over. What an earlier one did with these parameters ends, and with it the whole earlier one, because
a step of some of its parameters is none of its steps. One that the program has dropped ends, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

from poseidon.adapter.features import Features
from poseidon.adapter.membership import Membership
from poseidon.adapter.step_check import Compared
from poseidon.errors import PoseidonError
from poseidon.torch.exchange.synchronizer import Synchronizer
from poseidon.torch.model.parameters import SyncedParameter


class Update(Protocol):
    """What one DistributedOptimizer does with its parameters."""

    tenure: Tenure

    @property
    def entries(self) -> Sequence[SyncedParameter]:
        """Its parameters."""

    @property
    def exclusive(self) -> bool:
        """Whether nobody else can update these meanwhile."""

    def end(self, kept: Collection[SyncedParameter]) -> None:
        """Leaves its parameters to others; `kept` are those that may stay on the servers."""


class Tenure:
    """One DistributedOptimizer's time with its parameters, and what it compares with the other ranks meanwhile."""

    def __init__(self, owner: Any, features: Features, compared: Compared | None = None) -> None:
        self.owner = weakref.ref(owner)  # as long as the program keeps it
        self.features = features
        self.compared = compared
        self.over = False

    def note_sparse(self, entries: Iterable[SyncedParameter]) -> None:
        """Raises InvalidArgument if one of these, which the optimizer is to update, is sparse and must not be."""
        for entry in entries:
            if entry.form.is_sparse:
                self.features.add("sparse", entry.name)

    def check(self) -> None:
        """Raises PoseidonError if a later optimizer has taken over."""
        if self.over:
            raise PoseidonError(
                "this DistributedOptimizer has ended, because a later one has taken over some of its parameters: use "
                "the later one, or make one DistributedOptimizer for each part of the model"
            )


class Trained(Protocol):
    """A wrapped model's part in a job. `sync` is None with one worker."""

    optimizers: list[Any]
    sync: Synchronizer | None
    context: Membership
    features: Features
    entries: list[SyncedParameter]


def enter(model: Trained, update: Update) -> None:
    """`update` is one of the model's from now on."""
    model.optimizers.append(update)
    model.features.take(update.tenure.features)
    if model.sync is not None and update.tenure.compared is not None:
        model.sync.step_check.add(update.tenure.compared)


def succeed(model: Trained, entries: Collection[SyncedParameter], on_servers: bool) -> None:
    """Collective: a new update, perhaps `on_servers`, is to have these parameters.

    Earlier ones that have some of them end, and so do those that the program has dropped.
    When an optimizer is dropped may differ between ranks, so what has ended on one rank ends on all. InvalidArgument
    under `Recovery`, which has been given the earlier one, and where ranks have different parameters.
    """
    earlier: list[Update] = model.optimizers
    wanted, control, sync = set(entries), model.context.control, model.sync
    flags = [
        int(one.tenure.owner() is None or (one.exclusive and not wanted.isdisjoint(one.entries))) for one in earlier
    ]
    replaces = any(not wanted.isdisjoint(one.entries) for one in earlier)  # alike on all ranks, as `flags` may not be
    if (any(flags) and model.context.recovers and control is not None) or (
        replaces and not model.features.keeps("common_updates")
    ):
        model.features.check("successor")
    if earlier and control is not None and not model.context.recovers:
        flags = control.sum(flags)
    ended = [one for one, flag in zip(earlier, flags, strict=True) if flag]
    if ended and sync is not None:
        sync.settle()
    stored = [entry for entry in model.entries if entry.on_servers]
    for one in ended:
        one.tenure.over = True
        model.features.leave(one.tenure.features)
        one.end(wanted if on_servers else ())
        if sync is None:
            continue
        sync.updates = [update for update in sync.updates if update is not one]
        if one.tenure.compared is not None:
            sync.step_check.remove(one.tenure.compared)
    model.optimizers = [one for one in earlier if one not in ended]
    if sync is not None and not all(entry.on_servers for entry in stored):
        sync.layers.store([])  # what has left the servers needs layers of another kind
