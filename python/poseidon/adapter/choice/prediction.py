"""Predicts the time of a training step from what its exchanges need. Pure functions, times in seconds.

A step begins with its backward pass. A unit (a layer, or a group of small ones) is ready when its gradient exists. Then
three things happen one after the other: the busiest port carries its bytes, one unit after another; its last message is
on its way; and its factors are multiplied, again one unit after another. A processor of its own does that, or the
accelerator between two layers, which then come later. The step goes on with the next forward pass when the results are
in, or, for parameters of a worker-side DistributedOptimizer, when forward uses them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
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
    products_on_accelerator: bool = False  # between two layers; otherwise beside them

    @property
    def schemes(self) -> tuple[str, ...]:
        """The scheme of each unit now."""
        return tuple(unit.scheme for unit in self.units)

    def predict(self, schemes: Sequence[str]) -> Timeline:
        """The step in which the units take these schemes."""
        demands = [unit.demands[scheme] for unit, scheme in zip(self.units, schemes, strict=True)]
        product_s = [demand.multiply_adds / self.rates.multiply_adds_per_s for demand in demands]
        ready = [unit.ready_s for unit in self.units]
        arrived = self._arrived(demands, ready)
        if not self.products_on_accelerator:
            return self._run(_one_by_one(arrived, product_s), [0.0] * len(product_s))[0]
        step, ready = self._run(arrived, product_s)
        if any(product_s):  # layers that a product has delayed send later
            step, _ = self._run(self._arrived(demands, ready), product_s)
        return step

    def _run(self, arrived: Sequence[float], product_s: Sequence[float]) -> tuple[Timeline, list[float]]:
        """The step on the accelerator, and when it has made each unit's gradient."""
        units, accelerator = self.units, _Accelerator(arrived, product_s)
        ready, before_s = [0.0] * len(units), 0.0
        for index in sorted(range(len(units)), key=lambda index: units[index].ready_s):
            accelerator.compute(units[index].ready_s - before_s)
            ready[index], before_s = accelerator.now, units[index].ready_s
        accelerator.compute(max(0.0, self.backward_s - before_s))
        accelerator.wait_for(index for index, unit in enumerate(units) if not unit.awaited_at_use)
        total = sum(unit.backward_s for unit in units)
        # Forward passes take as long as the layers' backward passes, in proportion.
        for index in sorted(range(len(units)), key=lambda index: units[index].place):
            if units[index].awaited_at_use:
                accelerator.wait_for([index])
            accelerator.compute(self.rest_s * (units[index].backward_s / total if total else 1 / len(units)))
        return Timeline(accelerator.now, tuple(accelerator.completed)), ready

    def _arrived(self, demands: Sequence[Demand], ready: Sequence[float]) -> list[float]:
        """When all that a unit's result is made of is there, if gradients exist at `ready`."""
        return [
            end + demand.hops * self.rates.latency_s
            for end, demand in zip(self._carried(demands, ready), demands, strict=True)
        ]

    def _carried(self, demands: Sequence[Demand], ready: Sequence[float]) -> list[float]:
        """When the port has carried each unit. The most urgent goes first and stops others; of equal ones the first."""
        units = self.units
        left = [demand.carried_bytes / self.rates.link_bytes_per_s for demand in demands]
        by_ready = sorted(range(len(units)), key=ready.__getitem__)
        ends = [0.0] * len(units)
        waiting: list[tuple[int, float, int]] = []  # urgency, ready, index
        now, coming = 0.0, 0
        while waiting or coming < len(units):
            if not waiting:
                now = max(now, ready[by_ready[coming]])
            while coming < len(units) and ready[by_ready[coming]] <= now:
                unit = units[by_ready[coming]]
                heappush(
                    waiting, (unit.place if unit.awaited_at_use else -1, ready[by_ready[coming]], by_ready[coming])
                )
                coming += 1
            index = waiting[0][2]
            until = ready[by_ready[coming]] if coming < len(units) else math.inf
            if now + left[index] <= until:
                now += left[index]
                ends[index] = now
                heappop(waiting)
            else:
                left[index] -= until - now
                now = until
        return ends


class _Accelerator:
    """What computes layers, and products of what has arrived between them. `completed` has the units' results."""

    def __init__(self, arrived: Sequence[float], product_s: Sequence[float]) -> None:
        self.now = 0.0
        self.completed = list(arrived)
        self._arrived, self._product_s = arrived, product_s
        self._products = deque(sorted((index for index, own in enumerate(product_s) if own), key=arrived.__getitem__))

    def compute(self, seconds: float) -> None:
        """Makes the products that can be made, and then works on a layer for so long."""
        while self._products and self._arrived[self._products[0]] <= self.now:
            self._multiply()
        self.now += seconds

    def wait_for(self, indices: Iterable[int]) -> None:
        """Works on nothing but products until these units' results are there."""
        for index in indices:
            while index in self._products:
                self._multiply()
            self.now = max(self.now, self.completed[index])

    def _multiply(self) -> None:
        index = self._products.popleft()
        self.now = self.completed[index] = max(self.now, self._arrived[index]) + self._product_s[index]


def _one_by_one(arrived: Sequence[float], product_s: Sequence[float]) -> list[float]:
    """When a processor has made the products of all, in the order in which they arrive."""
    completed, free = list(arrived), 0.0
    for index in sorted(range(len(arrived)), key=arrived.__getitem__):
        if product_s[index]:
            free = completed[index] = max(free, arrived[index]) + product_s[index]
    return completed


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
