"""Simulated time, and what led to what in it."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

FORWARD, BACKWARD, PRODUCT = "forward", "backward", "product"
"""What workers do: the first two for a layer, the last for a unit."""
PUSHES, RESULTS, FACTORS = "pushes", "results", "factors"
"""What ports and the like carry of a unit: to servers, from servers, from worker to worker."""
SERVERS, NETWORK = "servers", "network"
"""Where the rest of the time goes: products of servers, and latencies."""


@dataclass(eq=False, slots=True)
class Activity:
    """What an accelerator, a port or another resource did: `what`, for the layer or the unit of number `of`.

    `before` is the activity whose end let this one begin: what came before it on the same resource if it had to wait
    for that, and else what made it possible.
    """

    where: str
    what: str
    of: int
    begin_s: float
    end_s: float
    before: Activity | None = field(repr=False)

    def chain(self) -> Iterator[Activity]:
        """This activity, and those that led to it, the latest first."""
        step: Activity | None = self
        while step is not None:
            yield step
            step = step.before


class Clock:
    """Simulated time in seconds, and what happens in it, in order."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ended: Activity | None = None  # the one whose end is happening now
        self._events: list[tuple[float, int, Activity, Callable[..., None], tuple[object, ...]]] = []
        self._count = 0

    def spend(
        self, seconds: float, where: str, what: str, of: int, action: Callable[..., None], *arguments: object
    ) -> None:
        """An activity begins now. Calls `action` when it ends. Of those that end at one time the first begun is first.

        Call this when the activity can begin: at once, or when what it waited for ends.
        """
        self._count += 1
        activity = Activity(where, what, of, self.now, self.now + seconds, self.ended)
        heapq.heappush(self._events, (activity.end_s, self._count, activity, action, arguments))

    def run(self) -> None:
        """Runs until nothing is left to happen."""
        while self._events:
            self.now, _, self.ended, action, arguments = heapq.heappop(self._events)
            action(*arguments)
