"""What steps have shown: rates of ports and processors, and when gradients were ready.

What servers and transports do while bytes arrive (sums, conversions) is part of the rate of the ports: it limits the
same bytes at the same time. All ports of a cluster carry equal shares, so the slowest one, in its slower direction,
decides the rate that every rank sees, whether a slow link or a slow peer is behind it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from poseidon import _core
from poseidon.adapter import cost
from poseidon.adapter.choice.prediction import Demand, Rates, StepModel, UnitWork, fitted
from poseidon.adapter.layer import SyncedLayer
from poseidon.adapter.stats import LayerSynchronization, StepRecord
from poseidon.schemes import SCHEMES

_MOST = 0.8  # of the bytes; what carries the rest is so small that it shows latencies and not rates
_DEVIATIONS = 2.0
_LEAST_NOISE = 0.02  # of a step: two medians of the same steps differ by less only by chance


@dataclass(frozen=True)
class Processor:
    """What is known of a cluster before its first step."""

    multiply_adds_per_s: float  # of the library on the slowest rank; inf: products are made elsewhere
    latency_s: float  # of one message


@dataclass(frozen=True)
class SeenUnit:
    """A unit's exchange in one step. Times are seconds from the beginning of backward."""

    layers: tuple[SyncedLayer, ...]
    scheme: str
    factor_count: int | None  # mean K over the workers
    ready_s: float
    started_s: float
    arrived_s: float  # before its products
    completed_s: float


def seen_units(layers: Mapping[str, SyncedLayer], record: StepRecord, worker_count: int) -> list[SeenUnit]:
    """The units of one step, in the order in which they were started. `layers` are the model's, by name."""
    members: dict[tuple[int, int], list[LayerSynchronization]] = {}
    for synchronization in record.layers:
        members.setdefault(layers[synchronization.name].unit, []).append(synchronization)

    def seconds(time_ns: int) -> float:
        return (time_ns - record.backward_begin_ns) / 1e9

    return [
        SeenUnit(
            tuple(layers[one.name] for one in unit),
            unit[0].scheme,
            cost.mean_factor_count(unit[0].factor_count, worker_count),
            seconds(max(one.gradient_ready_ns for one in unit)),
            seconds(max(one.started_ns for one in unit)),  # a group starts with its last member
            seconds(max(one.completed_ns - one.compute_ns for one in unit)),
            seconds(max(one.completed_ns for one in unit)),
        )
        for unit in members.values()
    ]


def demand(layers: Iterable[SyncedLayer], scheme: str, factor_count: int | None, cluster: _core.Cluster) -> Demand:
    """What the exchange of a unit with these layers needs."""
    own = list(layers)
    return Demand(
        sum(cost.carried_bytes(layer, scheme, factor_count, cluster) for layer in own),
        2 if SCHEMES[scheme].uses_servers else 1,
        sum(cost.multiply_adds(layer, scheme, factor_count, cluster) for layer in own),
    )


def make_model(
    layers: Sequence[SyncedLayer],
    choices: Mapping[str, Sequence[str]],
    records: Sequence[StepRecord],
    step_s: float,
    cluster: _core.Cluster,
    processor: Processor,
) -> StepModel | None:
    """The model of the latest step, with the rates that all records show. None if the step has sent nothing.

    `choices` has the schemes that layers may take, by name. `step_s` is the time of a step.
    """
    steps = _seen_works(layers, choices, records, cluster)
    rates = _rates(steps, processor)
    if rates is None:
        return None
    latest = records[-1]
    backward_s = (latest.backward_end_ns - latest.backward_begin_ns) / 1e9
    return fitted(steps[-1][1], rates, backward_s, step_s)


def measured_rates(
    layers: Sequence[SyncedLayer], records: Sequence[StepRecord], cluster: _core.Cluster, processor: Processor
) -> Rates | None:
    """The rates that all records show. None if the latest step has sent nothing."""
    return _rates(_seen_works(layers, {}, records, cluster), processor)


def _seen_works(
    layers: Sequence[SyncedLayer],
    choices: Mapping[str, Sequence[str]],
    records: Sequence[StepRecord],
    cluster: _core.Cluster,
) -> list[tuple[list[SeenUnit], list[UnitWork]]]:
    """The units of each step, and what their exchanges needed."""
    by_name = {layer.name: layer for layer in layers}
    steps = [seen_units(by_name, record, cluster.worker_count) for record in records]
    return [(step, _works(step, choices, cluster)) for step in steps]


def _rates(steps: Sequence[tuple[list[SeenUnit], list[UnitWork]]], processor: Processor) -> Rates | None:
    if not steps or not steps[-1][0]:
        return None
    known = [rate for seen, works in steps if (rate := _link_rate(seen, works, processor)) is not None]
    if not known:
        return None
    measured = [rate for seen, works in steps if (rate := _product_rate(seen, works)) is not None]
    return Rates(
        statistics.median(known),
        processor.latency_s,
        statistics.median(measured) if measured else processor.multiply_adds_per_s,
    )


def _works(seen: Sequence[SeenUnit], choices: Mapping[str, Sequence[str]], cluster: _core.Cluster) -> list[UnitWork]:
    works = []
    before = 0.0
    for unit in sorted(seen, key=lambda unit: unit.ready_s):
        names = tuple(layer.name for layer in unit.layers)
        open_to = choices.get(names[0], ()) if unit.factor_count is not None else ()
        works.append(
            UnitWork(
                names,
                unit.ready_s,
                unit.ready_s - before,
                min(layer.position for layer in unit.layers),
                all(layer.updater is not None for layer in unit.layers),
                unit.scheme,
                {
                    scheme: demand(unit.layers, scheme, unit.factor_count, cluster)
                    for scheme in dict.fromkeys([unit.scheme, *open_to])
                },
            )
        )
        before = unit.ready_s
    return works


def _link_rate(seen: Sequence[SeenUnit], works: Sequence[UnitWork], processor: Processor) -> float | None:
    """The bytes per second of the busiest port while it was busy."""
    demands = {work.names[0]: work.demands[work.scheme] for work in works}

    def span(unit: SeenUnit) -> tuple[float, float, float]:
        own = demands[unit.layers[0].name]
        # Servers make their products before they answer, which the worker does not see.
        unseen_s = own.multiply_adds / processor.multiply_adds_per_s if unit.arrived_s == unit.completed_s else 0.0
        return unit.started_s, max(unit.started_s, unit.arrived_s - unseen_s), own.carried_bytes

    spans = sorted(span(unit) for unit in seen)
    latency_s = processor.latency_s
    busy: list[tuple[float, float]] = []  # seconds and bytes of the times in which some exchange was under way
    end = -1.0
    for started, arrived, size in spans:
        if busy and started <= end:
            seconds, total = busy.pop()
            busy.append((seconds + max(0.0, arrived - end), total + size))
        else:
            busy.append((max(0.0, arrived - started - latency_s), size))
        end = max(end, arrived)
    wanted = _MOST * sum(size for _, size in busy)
    seconds = total = 0.0
    for span_s, size in sorted(busy, key=lambda span: -span[1]):
        if total >= wanted:
            break
        seconds, total = seconds + span_s, total + size
    return total / seconds if seconds > 0 and total > 0 else None


def _product_rate(seen: Sequence[SeenUnit], works: Sequence[UnitWork]) -> float | None:
    """The multiply-adds per second while products were made. Waiting for other products does not count."""
    counts = {work.names[0]: work.demands[work.scheme].multiply_adds for work in works}
    seconds = total = free = 0.0
    for unit in sorted(seen, key=lambda unit: unit.completed_s):
        begun = max(free, unit.arrived_s)
        if counts[unit.layers[0].name] and unit.completed_s > begun:
            seconds += unit.completed_s - begun
            total += counts[unit.layers[0].name]
            free = unit.completed_s
    return total / seconds if seconds > 0 else None


def noise_s(durations_s: Sequence[float]) -> float:
    """How much the median of as many steps may differ from this one, although nothing has changed."""
    middle = statistics.median(durations_s)
    spread = statistics.median(abs(duration - middle) for duration in durations_s)
    # The standard error of a median is 1.25 times that of a mean, and a deviation 1.48 times the median one.
    return max(_LEAST_NOISE * middle, _DEVIATIONS * 1.25 * 1.48 * spread / len(durations_s) ** 0.5)
