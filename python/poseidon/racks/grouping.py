"""From rates between all machines to racks, and to a verdict (Parameter Hub §3.4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

LEAST_RATIO = 1.25
"""Rates within racks over those between them. TCP's connections differ by less on one switch, in the median."""
LEAST_GAIN = 1.1
"""Adding up by rack costs each chunk one hop more."""

Rates = Sequence[Sequence[float]]
"""Bits per second: the one at [receiver][sender], while all send to all."""


@dataclass(frozen=True)
class Racks:
    """Machines by rack, both in ascending order. The rates are bits per second.

    within, between: of a pair of machines in one rack and in two, in the median.
    port: what a machine sends and receives at most.
    uplink: what the slowest rack sends to all others together, or receives from them.
    flat_s, by_rack_s: the seconds in which all exchange 1 GB of gradients all to all, and adding up by rack.
    """

    machines: list[list[int]]
    within: float
    between: float
    port: float
    uplink: float
    flat_s: float
    by_rack_s: float

    @property
    def pays(self) -> bool:
        """Whether adding up by rack is faster by more than the hop that it costs."""
        return self.flat_s > LEAST_GAIN * self.by_rack_s


def find_racks(rates: Rates) -> Racks | None:
    """The racks, or None if the rates show none: they are alike, or no division into racks explains them."""
    count = len(rates)
    pairs = {(one, other): (rates[one][other] + rates[other][one]) / 2 for one in range(count) for other in range(one)}
    if count < 3 or min(pairs.values()) <= 0:
        return None
    in_order = sorted(pairs.values())
    # The largest step between neighbouring rates parts those between racks from those within.
    step, border = max((high / low, math.sqrt(high * low)) for low, high in pairwise(in_order))
    machines = _groups(count, [pair for pair, rate in pairs.items() if rate > border])
    rack_of = {machine: rack for rack, members in enumerate(machines) for machine in members}
    within = [rate for (one, other), rate in pairs.items() if rack_of[one] == rack_of[other]]
    between = [rate for (one, other), rate in pairs.items() if rack_of[one] != rack_of[other]]
    if not within or not between or step <= 1 or min(within) <= border:
        return None
    # On one switch, a pair that is fast by chance would leave all others alone.
    if len(machines) > (count + 1) // 2:
        return None
    if median(within) < LEAST_RATIO * median(between):
        return None
    return _racks(rates, machines, rack_of, median(within), median(between))


def _groups(count: int, joined: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The connected parts, each in ascending order."""
    part_of = list(range(count))
    for one, other in joined:
        old, new = part_of[one], part_of[other]
        part_of = [new if part == old else part for part in part_of]
    return [[machine for machine in range(count) if part_of[machine] == part] for part in dict.fromkeys(part_of)]


def _racks(rates: Rates, machines: list[list[int]], rack_of: dict[int, int], within: float, between: float) -> Racks:
    count, rack_count = len(rates), len(machines)
    columns = list(zip(*rates, strict=True))
    port = max(max(map(sum, rates)), max(map(sum, columns)))

    def crossing(rack: int, table: Sequence[Sequence[float]]) -> float:
        return sum(table[one][other] for one in machines[rack] for other in range(count) if rack_of[other] != rack)

    uplink = min(min(crossing(rack, rates), crossing(rack, columns)) for rack in range(rack_count))
    # Each machine pushes to the shards of all others and sends them results. A rack of n machines of P pushes
    # n (P − n) / P models out and sends as much in results. Added up, it is one worker of as many as there are racks.
    gigabyte = 8e9
    at_port = 2 * gigabyte * (count - 1) / count / port
    crossings = max(len(members) * (count - len(members)) for members in machines) / count
    at_uplink = 2 * gigabyte * crossings / uplink
    by_rack = 2 * gigabyte * (rack_count - 1) / rack_count / uplink
    return Racks(machines, within, between, port, uplink, max(at_port, at_uplink), max(at_port, by_rack))
