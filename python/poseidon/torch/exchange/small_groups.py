"""Small parameters that travel together are handed over together: one call for a group, and not several for each.

Their gradients are copied, so that nobody else can write what is sent. At the end of backward they are compared with
what was sent, whoever may have written to them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import Protocol

import torch

from poseidon import _core
from poseidon.errors import PoseidonError
from poseidon.torch.exchange.transfer import Transfer
from poseidon.torch.model.gradient_form import DenseForm
from poseidon.torch.model.parameters import SyncedParameter
from poseidon.torch.tensors.memory import borrowed


class StartedRun(Protocol):
    """One synchronizing backward pass."""

    started: list[SyncedParameter]


class SmallGroup:
    """Parameters that travel together, with one piece of memory for all their gradients."""

    def __init__(self, entries: Sequence[SyncedParameter]) -> None:
        self.entries = entries
        self.fired: set[SyncedParameter] = set()  # in this backward
        ends = list(accumulate(entry.element_count for entry in entries))
        self._flat = torch.empty(ends[-1], dtype=entries[0].layout.dtype)
        self._sent, self._found = torch.empty_like(self._flat), torch.empty_like(self._flat)
        parts = [(entry, end - entry.element_count) for entry, end in zip(entries, ends, strict=True)]
        self._results = [_part(self._flat, entry, begin) for entry, begin in parts]
        self._copies = [_part(self._sent, entry, begin) for entry, begin in parts]
        self._finds = [_part(self._found, entry, begin) for entry, begin in parts]
        self._arrays = _core.Arrays(
            [borrowed(self._flat[begin : begin + entry.element_count]) for entry, begin in parts]
        )
        self._grads: list[torch.Tensor] = []

    def start(self, client: _core.Client, divisor: int, scale: float) -> bool:
        """Starts all exchanges. False, and nothing is done, if a gradient is missing or of an unusual kind."""
        grads = [entry.param.grad for entry in self.entries]
        if not all(type(grad) is torch.Tensor and grad.layout is torch.strided for grad in grads):
            return False
        if any(entry.updater is not None or entry.shared for entry in self.entries):
            return False
        self._grads = grads  # type: ignore[assignment]
        with torch.no_grad():
            torch._foreach_copy_(self._copies, self._grads)
            self._flat.copy_(self._sent)
            if scale != 1:
                self._flat.mul_(scale)
        client.start_all(self.entries[0].layer, self._arrays, divisor)
        return True

    @torch.no_grad()
    def finish(self, client: _core.Client) -> None:
        """Waits for the results and puts them into the gradients. PoseidonError if one was changed meanwhile."""
        client.wait_range(self.entries[0].layer, len(self.entries))
        torch._foreach_copy_(self._finds, self._grads)
        if not torch.equal(self._found.view(torch.uint8), self._sent.view(torch.uint8)):
            self._refuse_change()
        torch._foreach_copy_(self._grads, self._results)
        for entry, grad in zip(self.entries, self._grads, strict=True):
            if entry.param.grad is not grad:
                raise changed_meanwhile(entry, "replaced")
            if entry.was_absent:
                entry.note_absence(present=True)
        self._grads = []

    def _refuse_change(self) -> None:
        changed = (self._found.view(torch.uint8) != self._sent.view(torch.uint8)).nonzero()[0].item()
        ends = accumulate(entry.layout.nbytes for entry in self.entries)
        raise changed_meanwhile(next(entry for entry, end in zip(self.entries, ends, strict=True) if changed < end))


def _part(flat: torch.Tensor, entry: SyncedParameter, begin: int) -> torch.Tensor:
    return flat.as_strided(entry.layout.shape, entry.layout.stride(), begin)


def changed_meanwhile(entry: SyncedParameter, how: str = "changed in place") -> PoseidonError:
    """The error if a gradient was written to, or otherwise used, while it was exchanged."""
    return PoseidonError(
        f"the gradient of {entry.name} was {how} while it was exchanged: change gradients "
        "after backward(), or in hooks of the parameter itself, which come before its exchange"
    )


class SmallGroups:
    """The groups of one model. Used from the thread that runs backward. Without `connect` there are none."""

    def __init__(self) -> None:
        self._client: _core.Client | None = None
        self._transfer: Transfer | None = None
        self._group_of: dict[SyncedParameter, SmallGroup] | None = {}
        self._started: dict[SmallGroup, None] = {}  # in this backward, in this order

    def connect(self, client: _core.Client, transfer: Transfer, enabled: bool) -> None:
        """From now on exchanges go by `client`."""
        self._client, self._transfer = client, transfer
        self._group_of = None if enabled else {}

    def renew(self) -> None:
        """The layers have changed."""
        self._group_of = None if self._group_of else self._group_of

    def begin(self, entries: Sequence[SyncedParameter]) -> None:
        """A backward begins, in which nothing is started yet."""
        if self._group_of is None:
            self._group_of = {entry: group for group in _groups(entries) for entry in group.entries}
        self._started = {}
        for group in dict.fromkeys(self._group_of.values()):
            group.fired.clear()

    def has_started(self, entry: SyncedParameter) -> bool:
        """Whether the parameter's exchange is one of a group that has been started in this backward."""
        return bool(self._started) and (self._group_of or {}).get(entry) in self._started

    def take(self, run: StartedRun, entry: SyncedParameter, divisor: int) -> bool:
        """The gradient of `entry` is complete. True: its group starts it, or will."""
        group = (self._group_of or {}).get(entry)
        if group is None:
            return False
        group.fired.add(entry)
        return len(group.fired) < len(group.entries) or self._start(run, group, divisor)

    def take_rest(self, run: StartedRun, fired: Iterable[SyncedParameter], divisor: int) -> None:
        """Backward is over: starts the groups whose gradients are all there. The others are started one by one."""
        reached = set(fired)
        for group in dict.fromkeys((self._group_of or {}).values()):
            if group not in self._started and reached.issuperset(group.entries):
                self._start(run, group, divisor)

    def _start(self, run: StartedRun, group: SmallGroup, divisor: int) -> bool:
        assert self._client is not None
        assert self._transfer is not None
        if not group.start(self._client, divisor, self._transfer.scale()):
            return False
        self._started[group] = None
        run.started.extend(group.entries)
        return True

    def finish(self) -> int:
        """Waits for what has been started, and puts it into the gradients. Returns how long that takes, in ns."""
        since_ns = time.monotonic_ns()
        for group in self._started:
            assert self._client is not None
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
    return plain and not (entry.uses_factors or entry.counted or entry.sends_rows or entry.shared or entry.kept_count)
