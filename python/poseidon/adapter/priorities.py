"""Priorities: what the next forward pass needs first is exchanged first (Geryon §III).

The first training pass records the order in which forward really uses the parameters, so that branches and reuse count
correctly. The order of rank 0 counts. It gives each layer's urgency and, with the threshold, its class.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from poseidon import _core
from poseidon.adapter.control import Control
from poseidon.adapter.layer import SyncedLayer
from poseidon.adapter.threshold_search import ThresholdSearch
from poseidon.options import Settings

_now_ns = time.monotonic_ns


class Priorities:
    """The priorities of one model's layers. `entries` are in the order of their layers."""

    _client: _core.Client
    _control: Control

    def __init__(self, settings: Settings, entries: Sequence[SyncedLayer]) -> None:
        self._entries = entries
        self._order = settings.priority_order
        self._last_class = settings.priority_classes - 1
        self._coarse = settings.priority_threshold == "coarse"
        self._search: ThresholdSearch | None = None
        self._threshold: float | None = None
        if settings.priority_threshold == "auto":
            self._search = ThresholdSearch()
        elif not self._coarse:
            self._threshold = float(settings.priority_threshold)
        if not self._last_class or self._order == "fifo":  # no threshold makes a difference
            self._search, self._threshold = None, 0.0
        self._used: dict[SyncedLayer, None] | None = None  # in the order of their first uses, while recording
        self._recorded = False
        self._agreed = False
        self._applied: float | None = None
        self._run_began_ns: int | None = None
        for position, entry in enumerate(entries[::-1]):  # until forward has been seen: as they were registered
            entry.position = position

    def connect(self, client: _core.Client, control: Control) -> None:
        """Connects to `client`, where the layers are new. The ranks agree again, and an unfinished search restarts."""
        self._client, self._control = client, control
        self._agreed, self._run_began_ns = False, None
        if self._search is not None and not self._search.finished:
            self._search = ThresholdSearch()
        self.renew()

    @property
    def decision(self) -> int:
        """What the search has found, for `decide`. -1: it has found nothing yet."""
        return -1 if self._search is None or self._search.decision is None else self._search.decision

    def decide(self, decision: int) -> None:
        """Takes the result of the search on another rank."""
        if self._search is not None and decision >= 0:
            self._search.decide(decision)

    @property
    def threshold(self) -> float | None:
        """The present urgency above which layers are in class 0. None if the kind of layer decides the class."""
        return None if self._coarse else self._search.threshold if self._search is not None else self._threshold

    @property
    def settled(self) -> bool:
        """Whether the threshold is final."""
        return self._search is None or self._search.finished

    @property
    def recording_now(self) -> bool:
        """Whether the forward pass that records the order is under way."""
        return self._used is not None

    def begin_recording(self) -> bool:
        """Begins a forward pass. Returns whether it records the order: the first pass that ends well does."""
        if self._recorded:
            return False
        self._used = {}
        return True

    def end_recording(self, ended_well: bool) -> None:
        """Ends the forward pass that records the order."""
        assert self._used is not None
        if ended_well:
            self._recorded = True
            for position, entry in enumerate([*self._used, *(e for e in self._entries[::-1] if e not in self._used)]):
                entry.position = position
        self._used = None

    def note_use(self, entries: Sequence[SyncedLayer]) -> None:
        """Notes that forward uses these parameters now."""
        if self._used is not None:
            for entry in entries:
                self._used.pop(entry, None)  # it may have been taken out of its module for something else, earlier
                self._used[entry] = None

    def note_taken(self, entry: SyncedLayer) -> bool:
        """Notes that forward has taken the parameter out of its module. Returns whether its use must still be noted."""
        if self._used is None:
            return False
        self._used.setdefault(entry)
        return True

    def begin_run(self) -> None:
        """Sets the priorities of the next exchanges. Collective, before the first exchange of every backward."""
        if not self._agreed:
            self._agreed = True
            self._agree_on_order()
        if self._order == "fifo":
            return
        self._advance_search()
        threshold = 0.0 if self.threshold is None else self.threshold
        if threshold != self._applied:
            self._applied = threshold
            self._apply(threshold)

    def renew(self) -> None:
        """Notes that the layers have new numbers in the client."""
        self._applied = None

    def _agree_on_order(self) -> None:
        own = [entry.position if self._client.rank == 0 else 0 for entry in self._entries]
        positions = self._control.sum(own)
        for entry, position in zip(self._entries, positions, strict=True):
            entry.position = position
        places = ordered_places(self._order, len(positions))
        for entry in self._entries:
            # At the end of backward all wait for what no DistributedOptimizer updates.
            entry.urgency = 1.0 if entry.updater is None else 1 - places[entry.position] / len(places)

    def _advance_search(self) -> None:
        """Adds a step, from backward to backward, that was made with the threshold with which its backward began."""
        now, began = _now_ns(), self._run_began_ns
        self._run_began_ns = now
        if self._search is None or self._search.finished or began is None:
            return
        self._search.add(now - began)
        if self._search.complete:
            totals = self._control.sum(self._search.durations_ns)
            best = self._search.best(totals)
            self._search.decide(self._control.sum([best if self._client.rank == 0 else 0])[0])

    def _apply(self, threshold: float) -> None:
        run: list[SyncedLayer] = []
        for entry in sorted(self._entries, key=lambda entry: entry.layer):
            if run and entry.layer != run[-1].layer + 1:
                self._set(run, threshold)
                run = []
            run.append(entry)
        self._set(run, threshold)

    def _set(self, entries: Sequence[SyncedLayer], threshold: float) -> None:
        """`entries` have consecutive layers."""
        urgencies = [0.0 if entry.urgency is None else entry.urgency for entry in entries]
        self._client.set_priorities(entries[0].layer, urgencies, [self.class_of(entry) for entry in entries], threshold)

    def class_of(self, entry: SyncedLayer) -> int:
        """The class of the parameter's next exchange. 0 is the most urgent."""
        if entry.urgency is None or self._order == "fifo" or not self._last_class:
            return self._last_class
        if self.threshold is None:
            return self._last_class if entry.fully_connected and entry.updater is not None else 0
        return _core.priority_class(entry.urgency, self.threshold, self._last_class + 1)


def ordered_places(order: str, count: int) -> list[int]:
    """The place of each of `count` layers in the order in which they are urgent, by their position in forward."""
    places = list(range(count))
    if order == "reverse":
        places.reverse()
    elif order == "random":
        random.Random(0).shuffle(places)
    return places
