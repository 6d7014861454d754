"""Small parameters that travel together are handed over together: one call for a group, and not several for each.

Their gradients are copied, so that nobody else can write what is sent. At the end of backward they are compared with
what was sent, whoever may have written to them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from operator import is_
from typing import Any

import torch

from poseidon import _core
from poseidon.torch.exchange.pending_exchange import changed_meanwhile
from poseidon.torch.exchange.runs import BackwardRun
from poseidon.torch.exchange.transfer import Transfer
from poseidon.torch.model.gradient_form import DenseForm
from poseidon.torch.model.hooks import NO_ARRIVALS, Arrivals
from poseidon.torch.model.parameters import SyncedParameter
from poseidon.torch.tensors.memory import borrowed


class SmallGroup:
    """Parameters that travel together, with one piece of memory for all their gradients."""

    def __init__(self, entries: Sequence[SyncedParameter]) -> None:
        self.entries = entries
        self.arrivals = Arrivals()  # in this backward
        for entry in entries:
            entry.arrivals = self.arrivals
        # Here, and in the memory, vectors come first: to copy them takes one call.
        self._arranged = sorted(entries, key=lambda entry: len(entry.layout.shape) != 1)
        self._params = [entry.param for entry in self._arranged]
        self._grads: list[torch.Tensor] = []
        self._arrays: _core.Arrays | None = None

    def _allocate(self) -> _core.Arrays:
        """Not before the first exchange: a model may be wrapped and never trained."""
        ends = list(accumulate(entry.element_count for entry in self._arranged))
        begins = {entry: end - entry.element_count for entry, end in zip(self._arranged, ends, strict=True)}
        self._flat = torch.empty(ends[-1], dtype=self.entries[0].layout.dtype)
        self._results = [_part(self._flat, entry, begin) for entry, begin in begins.items()]
        self._sent, self._found = _Copies(self._flat, begins), _Copies(self._flat, begins)
        places = [(begins[entry], entry.element_count) for entry in self.entries]
        return _core.Arrays([borrowed(self._flat[begin : begin + count]) for begin, count in places])

    def start(self, client: _core.Client, divisor: int, scale: float) -> bool:
        """Starts all exchanges. False, and nothing is done, if a gradient is missing or of an unusual kind."""
        grads: list[Any] = [param.grad for param in self._params]
        if set(map(type, grads)) != {torch.Tensor} or {grad.layout for grad in grads} != {torch.strided}:
            return False
        # torch writes no group of tensors with a negative view among them. Alone it can be exchanged.
        if any(map(torch.is_neg, grads)):
            return False
        # Whatever has an updater or is shared hears of gradients before they are accumulated.
        heard = [entry for entry in self.entries if entry.hears_before]
        if any(entry.updater is not None or entry.shared for entry in heard):
            return False
        if self._arrays is None:
            self._arrays = self._allocate()
        self._grads = grads
        with torch.no_grad():
            self._sent.take(grads)
            self._flat.copy_(self._sent.flat)
            if scale != 1:
                self._flat.mul_(scale)
        client.start_all(self.entries[0].layer, self._arrays, divisor)
        return True

    @torch.no_grad()
    def finish(self, client: _core.Client) -> None:
        """Waits for the results and puts them into the gradients. PoseidonError if one was changed meanwhile."""
        client.wait_range(self.entries[0].layer, len(self.entries))
        grads, self._grads = self._grads, []
        self._found.take(grads)
        if not torch.equal(self._found.flat.view(torch.uint8), self._sent.flat.view(torch.uint8)):
            self._refuse_change()
        torch._foreach_copy_(grads, self._results)
        if not all(map(is_, [param.grad for param in self._params], grads)):
            places = zip(self._arranged, grads, strict=True)
            raise changed_meanwhile(next(entry for entry, grad in places if entry.param.grad is not grad), "replaced")
        for entry in [entry for entry in self.entries if entry.was_absent]:
            entry.note_absence(present=True)

    def _refuse_change(self) -> None:
        changed = (self._found.flat.view(torch.uint8) != self._sent.flat.view(torch.uint8)).nonzero()[0].item()
        ends = accumulate(entry.layout.nbytes for entry in self._arranged)
        raise changed_meanwhile(next(entry for entry, end in zip(self._arranged, ends, strict=True) if changed < end))


class _Copies:
    """Copies of a group's gradients in memory like that of their results, `like`, each at its place."""

    def __init__(self, like: torch.Tensor, begins: Mapping[SyncedParameter, int]) -> None:
        """`begins`: the places, in the order in which gradients are given: first those of vectors, without gaps."""
        self.flat = torch.empty_like(like)
        others = [(entry, begin) for entry, begin in begins.items() if len(entry.layout.shape) != 1]
        self._vector_count = len(begins) - len(others)
        self._vectors = self.flat[: others[0][1] if others else None]
        self._others = [_part(self.flat, entry, begin) for entry, begin in others]

    def take(self, grads: list[torch.Tensor]) -> None:
        """Copies these gradients."""
        if self._vector_count:
            torch.cat(grads[: self._vector_count], out=self._vectors)
        if self._others:
            torch._foreach_copy_(self._others, grads[self._vector_count :])


def _part(flat: torch.Tensor, entry: SyncedParameter, begin: int) -> torch.Tensor:
    return flat.as_strided(entry.layout.shape, entry.layout.stride(), begin)


class SmallGroups:
    """The groups of one model. Used from the thread that runs backward. Without `connect` there are none."""

    _client: _core.Client
    _transfer: Transfer

    def __init__(self) -> None:
        self._entries: Sequence[SyncedParameter] = ()
        self._groups: list[SmallGroup] = []
        self._group_of: dict[SyncedParameter, SmallGroup] = {}
        self._alone: list[SyncedParameter] = []  # in no group
        self._started: dict[SmallGroup, None] = {}  # in this backward, in this order

    def connect(self, client: _core.Client, transfer: Transfer, entries: Sequence[SyncedParameter]) -> None:
        """From now on exchanges go by `client`, those of small parameters among `entries` in groups."""
        self._client, self._transfer, self._entries = client, transfer, entries
        self.renew()

    def renew(self) -> None:
        """The layers have changed."""
        self.end()
        for entry in self._entries:
            entry.arrivals = NO_ARRIVALS
        self._groups = list(_groups(self._entries))
        self._group_of = {entry: group for group in self._groups for entry in group.entries}
        self._alone = [entry for entry in self._entries if entry not in self._group_of]

    def has(self, entry: SyncedParameter) -> bool:
        """Whether the parameter is in a group."""
        return entry in self._group_of

    def begin(self) -> None:
        """A backward begins, in which nothing is started yet."""
        self._started = {}
        for group in self._groups:
            group.arrivals.awaited.update(group.entries)

    def count(self, run: BackwardRun) -> None:
        """In the pass of autograd's that runs now hooks only count the gradients of groups, all but the last ones."""
        task = torch._C._current_graph_task_id()
        for group in self._groups:
            group.arrivals.task, group.arrivals.ready_ns = task, run.ready_ns

    def end(self) -> None:
        """Backward is over, or has failed."""
        for group in self._groups:
            group.arrivals.awaited.clear()
            group.arrivals.task, group.arrivals.ready_ns = None, {}

    def has_started(self, entry: SyncedParameter) -> bool:
        """Whether the parameter's exchange is one of a group that has been started in this backward."""
        return bool(self._started) and self._group_of.get(entry) in self._started

    def take(self, run: BackwardRun, entry: SyncedParameter, divisor: int) -> bool:
        """The gradient of `entry` is complete. True: its group starts it, or it has to wait for the end of backward.

        It has, too, where the group cannot start. Nobody would be told if a gradient came for it in the meantime.
        """
        group = self._group_of.get(entry)
        if group is None:
            return False
        awaited = group.arrivals.awaited
        awaited.discard(entry)
        if not awaited:
            self._start(run, group, divisor)
        return True

    def take_rest(self, run: BackwardRun, divisor: int) -> None:
        """Backward is over: starts the groups whose gradients are all there. The others are started one by one."""
        for group in self._groups:
            if group not in self._started and run.ready_ns.keys() >= set(group.entries):
                self._start(run, group, divisor)

    def not_started(self, entries: Sequence[SyncedParameter]) -> Sequence[SyncedParameter]:
        """Those of the model's parameters that no group has started."""
        if self._groups and len(self._started) == len(self._groups):
            return self._alone
        return [entry for entry in entries if not self.has_started(entry)]

    def _start(self, run: BackwardRun, group: SmallGroup, divisor: int) -> None:
        if group.start(self._client, divisor, self._transfer.weight.scale()):
            self._started[group] = None
            run.started.extend(group.entries)

    def finish(self) -> int:
        """Waits for what has been started, and puts it into the gradients. Returns how long that takes, in ns."""
        since_ns = time.monotonic_ns()
        for group in self._started:
            group.finish(self._client)
        return time.monotonic_ns() - since_ns


def _groups(entries: Sequence[SyncedParameter]) -> Iterator[SmallGroup]:
    places = {entry: entry.layer - place for place, entry in enumerate(entries)}  # equal where layers follow each other
    for _, run in groupby(entries, key=lambda entry: (_is_small(entry), entry.unit, entry.dtype, places[entry])):
        members = list(run)
        if _is_small(members[0]) and len(members) > 1:
            yield SmallGroup(members)


def _is_small(entry: SyncedParameter) -> bool:
    """Whether the gradient may travel with others', as it lies in memory."""
    plain = type(entry.form) is DenseForm and entry.param.device.type == "cpu" and entry.stored is None
    return plain and not (entry.counted or entry.sends_rows or entry.shared or entry.kept_count)
