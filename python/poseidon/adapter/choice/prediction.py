"""Predicts the time of a training step from what its exchanges need. Pure functions, times in seconds.

A step begins with its backward pass. A unit (a layer, or a group of small ones) is ready when its gradient exists. Then
three things happen one after the other: the busiest port carries its bytes, one unit after another; its last message is
on its way; and a processor multiplies its factors, again one unit after another. The step goes on with the next forward
pass when the results are in, or, for parameters of a worker-side DistributedOptimizer, when forward uses them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush


@dataclass(frozen=True)
class Demand:
    """What the exchange of one unit needs under one scheme."""

    carried_bytes: float  # that the busiest port sends, or receives, whichever is more
    hops: int  # messages that follow one another
    multiply_adds: float  # of the busiest process, when everything has arrived


@dataclass(frozen=True)
class Rates:
    """How fast the cluster is."""

    link_bytes_per_s: float  # of a port in one direction
    latency_s: float  # of one message
    multiply_adds_per_s: float


@dataclass(frozen=True)
class UnitWork:
    """One unit of a step."""

    names: tuple[str, ...]  # of its layers
    ready_s: float  # from the beginning of backward
    backward_s: float  # the part of backward that ends when it is ready
    place: int  # in the order in which forward uses the units
    awaited_at_use: bool  # the next forward pass waits for it where it uses it, and not backward's end
    scheme: str  # that it takes now
    demands: Mapping[str, Demand]  # by scheme; those that it may take


@dataclass(frozen=True)
class Timeline:
    """A predicted step."""

    seconds: float
    completed_s: tuple[float, ...]  # by unit, from the beginning of backward


@dataclass(frozen=True)
class StepModel:
    """All that the time of a step depends on, besides the units' schemes."""

    units: Sequence[UnitWork]
    rates: Rates
    backward_s: float
    rest_s: float  # forward pass, updates and everything else, without waits for exchanges

    @property
    def schemes(self) -> tuple[str, ...]:
        """The scheme of each unit now."""
        return tuple(unit.scheme for unit in self.units)

    def predict(self, schemes: Sequence[str]) -> Timeline:
        """The step in which the units take these schemes."""
        demands = [unit.demands[scheme] for unit, scheme in zip(self.units, schemes, strict=True)]
        completed = self._completed(demands)
        ends = [end for unit, end in zip(self.units, completed, strict=True) if not unit.awaited_at_use]
        now = max([self.backward_s, *ends])
        total = sum(unit.backward_s for unit in self.units)
        # Forward passes take as long as the layers' backward passes, in proportion.
        for index in sorted(range(len(self.units)), key=lambda index: self.units[index].place):
            unit = self.units[index]
            if unit.awaited_at_use:
                now = max(now, completed[index])
            now += self.rest_s * (unit.backward_s / total if total else 1 / len(self.units))
        return Timeline(now, tuple(completed))

    def _completed(self, demands: Sequence[Demand]) -> list[float]:
        """When each unit's result is there. Products run one after the other, as their parts arrive."""
        arrived = [
            end + demand.hops * self.rates.latency_s
            for end, demand in zip(self._carried(demands), demands, strict=True)
        ]
        completed = list(arrived)
        free = 0.0
        for index in sorted(range(len(arrived)), key=arrived.__getitem__):
            if demands[index].multiply_adds:
                free = max(free, arrived[index]) + demands[index].multiply_adds / self.rates.multiply_adds_per_s
                completed[index] = free
        return completed

    def _carried(self, demands: Sequence[Demand]) -> list[float]:
        """When the port has carried each unit. The most urgent goes first and stops others; of equal ones the first."""
        units = self.units
        left = [demand.carried_bytes / self.rates.link_bytes_per_s for demand in demands]
        by_ready = sorted(range(len(units)), key=lambda index: units[index].ready_s)
        ends = [0.0] * len(units)
        waiting: list[tuple[int, float, int]] = []  # urgency, ready, index
        now, coming = 0.0, 0
        while waiting or coming < len(units):
            if not waiting:
                now = max(now, units[by_ready[coming]].ready_s)
            while coming < len(units) and units[by_ready[coming]].ready_s <= now:
                unit = units[by_ready[coming]]
                heappush(waiting, (unit.place if unit.awaited_at_use else -1, unit.ready_s, by_ready[coming]))
                coming += 1
            index = waiting[0][2]
            until = units[by_ready[coming]].ready_s if coming < len(units) else math.inf
            if now + left[index] <= until:
                now += left[index]
                ends[index] = now
                heappop(waiting)
            else:
                left[index] -= until - now
                now = until
        return ends


def fitted(units: Sequence[UnitWork], rates: Rates, backward_s: float, step_s: float) -> StepModel:
    """The model whose prediction for the present schemes is the measured time of a step, if there is one.

    The rest of the step is what its exchanges and its backward pass do not explain.
    """
    low, high = 0.0, max(0.0, step_s - backward_s)
    for _ in range(30):  # the prediction grows with the rest
        middle = (low + high) / 2
        model = StepModel(units, rates, backward_s, middle)
        low, high = (middle, high) if model.predict(model.schemes).seconds < step_s else (low, middle)
    return StepModel(units, rates, backward_s, low)
