"""The backward passes of a sharded model: its DTensors get gradients, and their parts on this rank are exchanged."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from poseidon.errors import InvalidArgument
from poseidon.torch.exchange.flights import Flights
from poseidon.torch.exchange.synchronizer import Synchronizer
from poseidon.torch.model.hooks import accumulating_nodes, posthook, prehook
from poseidon.torch.model.parameters import SyncedParameter
from poseidon.torch.model.passes import Mode
from poseidon.torch.model.shards import LocalShards, fsdp_groups
from poseidon.torch.tensors.shard import Shard
from poseidon.torch.tensors.watched import Watched


class ShardedGradients:
    """Tells the parts of DTensors of the backward passes that reach these.

    FSDP and autograd tell of a gradient by the same hook, once it is in `.grad`. Used from the thread that runs
    backward.
    """

    def __init__(self, shards: LocalShards, entries: Sequence[SyncedParameter], sync: Synchronizer) -> None:
        self._sync = weakref.ref(sync)
        self._shards: list[Shard] = []
        self._nodes: list[Any] = []  # of the DTensors that autograd adds to, whose hooks live as long
        groups = fsdp_groups(shards)
        by_group: dict[Any, list[SyncedParameter]] = {}
        for entry in entries:
            shard, whole = entry.param, entry.whole
            if not isinstance(shard, Shard):
                continue
            _check_hooks(entry.name, whole)
            self._shards.append(shard)
            group = groups.get(whole)
            if group is None:
                self._nodes.append(_hear_before(entry, whole))
            else:
                by_group.setdefault(group, []).append(entry)
            whole.register_post_accumulate_grad_hook(_Hook(self, entry, group))
        for group, gathered in by_group.items():
            group.unshard = _Before(group.unshard, partial(_update, weakref.ref(sync.flights)), gathered)
            group.post_backward = _Before(group.post_backward, _show, gathered)

    def arrived(self, entry: SyncedParameter, shard: Shard, group: Any) -> None:
        """The gradient is in `.grad` of the DTensor. `group` is FSDP's, if it has made it."""
        whole, sync = entry.whole, self._sync()
        _check_hooks(entry.name, whole, own=1)
        grad = whole.grad
        if sync is None or grad is None or (group is not None and not group.all_reduce_grads):
            return
        if tuple(grad.placements) != tuple(whole.placements):  # tensor parallelism leaves sums that nobody has made
            whole.grad = grad.redistribute(placements=whole.placements)
        if group is not None:
            prehook(entry)((None,))
        if sync.mode is Mode.EXCHANGED:
            shard.own()
        posthook(entry)(None, (None,))

    def show(self, *_: Any) -> None:
        """All exchanges of a backward pass are over: whoever looks at `.grad` of a DTensor sees a DTensor."""
        for shard in self._shards:
            shard.show()


class _Hook:
    """What is called with a DTensor when its gradient is there. It keeps no model alive."""

    def __init__(self, gradients: ShardedGradients, entry: SyncedParameter, group: Any) -> None:
        self._gradients, self._entry, self._group = weakref.ref(gradients), weakref.ref(entry), group

    def __call__(self, _: Any) -> None:
        gradients, entry = self._gradients(), self._entry()
        if gradients is not None and entry is not None and isinstance(entry.param, Shard):
            gradients.arrived(entry, entry.param, self._group)


class _Before:
    """Stands in the place of a method of one of FSDP's groups: calls `first` with the group's parameters, then it."""

    def __init__(
        self,
        method: Callable[..., Any],
        first: Callable[[Sequence[SyncedParameter]], None],
        entries: Sequence[SyncedParameter],
    ) -> None:
        self._method, self._first, self._entries = method, first, entries

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._first(self._entries)
        return self._method(*args, **kwargs)


def _update(reference: weakref.ref[Flights], entries: Sequence[SyncedParameter]) -> None:
    """FSDP is about to gather the parts of a group: updates of them that are due come first."""
    watched = [entry for entry in entries if isinstance(entry.whole, Watched)]
    if watched and (flights := reference()) is not None:
        flights.used(watched)


def _show(entries: Sequence[SyncedParameter]) -> None:
    """FSDP is about to add to the gradients of a group, and takes DTensors alone."""
    for entry in entries:
        if isinstance(entry.param, Shard):
            entry.param.show()


def _hear_before(entry: SyncedParameter, whole: Any) -> Any:
    """Before autograd adds to the DTensor's `.grad`, that is no stand-in. Returns what keeps the hook alive."""
    (node,) = accumulating_nodes([whole])
    before, shard = prehook(entry), weakref.ref(entry.param)

    def hook(gradients: Any) -> None:
        before(gradients)
        part = shard()
        if isinstance(part, Shard):
            part.show()

    node.register_prehook(hook)
    return node


def _check_hooks(name: str, param: Any, own: int = 0) -> None:
    """Other hooks of the same kind would see the gradient before it is the mean over the replicas."""
    if len(getattr(param, "_post_accumulate_grad_hooks", None) or {}) > own:
        raise InvalidArgument(
            f"parameter {name} has a hook by register_post_accumulate_grad_hook(), which would see this rank's own "
            "gradient: use the gradient after backward()"
        )
