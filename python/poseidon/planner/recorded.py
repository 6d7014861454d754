"""What a recorded run (`poseidon.adapter.run_record`) was: its layers and their times, its cluster, its exchange."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from poseidon.adapter.plan_table import CHOSEN_BY_USER, PlanRow
from poseidon.adapter.run_record import RunRecord
from poseidon.adapter.stats import StepRecord
from poseidon.errors import InvalidArgument
from poseidon.models import LayerSpec, ModelTable
from poseidon.planner.cluster import ClusterSpec
from poseidon.planner.layers import Exchange
from poseidon.planner.workload import is_known

_LEAST_HOSTS = 3  # of two, both have the rate of the slower
_SLOW = 0.6  # of what a usual host's best connection carries, or less
_Sent = dict[tuple[int, int], tuple[int, float]]  # from rank to rank: bytes, and seconds in which some were on the way


_ALIKE = 0.05  # of a step: workers whose times differ by less are alike
_NARROW = {"bfloat16", "float16"}
_WHOLE_BITS = 8e9  # of a port of which nothing is known; it is replaced by what was measured


@dataclass(frozen=True)
class RecordedRun:
    """A run. `step_s` is the median of the recorded steps, from the begin of one backward pass to the next.

    `schemes` has each layer's. `slow_host` is the host whose worker computes longest, if it does so for longer than the
    others; None: none does. `slow_table` has its times. `slow_port` is the host whose port is slow, whose rate the
    cluster has, and `port_ratio` says how many times as fast, at least, those of the others are. `knows_factors`: the
    run has told K of layers that have one. `can_overlap`: its framework can exchange a layer beside the next forward
    pass. A gradient's elements have `number_bytes` each.
    A step of one worker stands for a sample, because the run has told no batch.
    """

    title: str
    step_s: float
    table: ModelTable
    cluster: ClusterSpec
    exchange: Exchange
    schemes: dict[str, str]
    slow_host: str | None
    slow_table: ModelTable | None
    slow_port: str | None
    port_ratio: float
    knows_factors: bool
    can_overlap: bool
    number_bytes: int


def read_run(records: Sequence[RunRecord]) -> RecordedRun:
    """The run that these are the records of. Raises InvalidArgument for one that no prediction knows."""
    first = records[0]
    _check(first)
    works = [_work_s(one.steps) for one in records]
    usual_s = median(works)
    step_s = max(median(_periods_s(one.steps)) for one in records)
    slow = records[works.index(max(works))] if max(works) - usual_s > _ALIKE * step_s else None
    port = slow_port(records)
    typical = records[works.index(min(works, key=lambda work_s: abs(work_s - usual_s)))]
    return RecordedRun(
        first.title,
        step_s,
        _table(typical, usual_s),
        _cluster(records, 1.0 if slow is None else max(works) / usual_s),
        _exchange(first),
        {row.layer: row.scheme for row in first.plan},
        None if slow is None else _name(slow, records),
        None if slow is None else _table(slow, max(works)),
        None if port is None else _name(records[port[0]], records),
        1.0 if port is None else port[1],
        any(row.factor_count for row in first.plan),
        first.framework == "torch",
        2 if {row.dtype for row in first.plan} <= _NARROW else 4,
    )


def _name(record: RunRecord, records: Sequence[RunRecord]) -> str:
    """What tells the record's host from the others."""
    hosts = [one.host for one in records]
    return record.host if hosts.count(record.host) == 1 else f"rank {record.rank}"


def _check(record: RunRecord) -> None:
    options = record.options
    lossy = sorted({row.scheme for row in record.plan if not is_known(row.scheme)} - {"rows"})
    if lossy:
        raise InvalidArgument(f"this run has layers with {', '.join(lossy)}, of which no prediction knows the times")
    exchanged = {layer.name for step in record.steps for layer in step.layers}
    if not {row.layer for row in record.plan} <= exchanged:
        raise InvalidArgument(
            "this run's gradients went through a communication hook, or its plan has changed: nothing is known of the "
            "exchange of some layers"
        )
    for name, usual in (("stragglers", "wait"), ("consistency", "bsp"), ("parameter_wire", "fp32")):
        if options[name] != usual:
            raise InvalidArgument(f"this run has {name}={options[name]}, of which no prediction knows the times")


def _periods_s(steps: Sequence[StepRecord]) -> list[float]:
    """From the begin of each backward pass to that of the next."""
    return [(later.backward_begin_ns - step.backward_begin_ns) / 1e9 for step, later in pairwise(steps)]


def _work_s(steps: Sequence[StepRecord]) -> float:
    """A step without its waits for results."""
    return median(period - step.waited_ns / 1e9 for period, step in zip(_periods_s(steps), steps, strict=False))


def _table(record: RunRecord, work_s: float) -> ModelTable:
    """The layers of a run. What is not backward counts as forward: the optimizer, the input, and all else."""
    own_s = _own_backward_s(record.steps)
    backward_s = min(median(step.backward_end_ns - step.backward_begin_ns for step in record.steps) / 1e9, work_s)
    known_s = sum(own_s.values())
    layers, seconds = [], []
    for name, rows in _modules(record.plan).items():
        part = sum(own_s[row.layer] for row in rows) / known_s if known_s else 1 / len(record.plan)
        layers.append(_layer(name, rows))
        seconds.append(((work_s - backward_s) * part, backward_s * part))
    return ModelTable(
        record.title,
        tuple(layers),
        1,
        work_s,
        f"{record.title}, the median of {len(record.steps)} steps",
        sample="step",
        forward_share=1 - backward_s / work_s,
        seconds=tuple(seconds),
    )


def _own_backward_s(steps: Sequence[StepRecord]) -> dict[str, float]:
    """What backward takes from the gradient before to that of each layer, the median of the steps."""
    found: dict[str, list[float]] = {}
    for step in steps:
        before_ns = step.backward_begin_ns
        for layer in sorted(step.layers, key=lambda layer: layer.gradient_ready_ns):
            found.setdefault(layer.name, []).append(max(0, layer.gradient_ready_ns - before_ns) / 1e9)
            before_ns = max(before_ns, layer.gradient_ready_ns)
    return {name: median(times) for name, times in found.items()}


def _modules(plan: Sequence[PlanRow]) -> dict[str, list[PlanRow]]:
    """The parameters of each module in which the planner knows them: a weight and then its bias, all others alone."""
    found: dict[str, list[PlanRow]] = {}
    rows_of = {row.layer: row.shape[:1] for row in plan}
    for row in plan:
        module, _, own = row.layer.rpartition(".")
        together = own == "weight" or (own == "bias" and rows_of.get(f"{module}.weight") == row.shape)
        rows = found.setdefault(module if together else row.layer, [])
        rows.insert(0 if own == "weight" else len(rows), row)
    return found


def _layer(name: str, rows: Sequence[PlanRow]) -> LayerSpec:
    weight = rows[0]
    shape, count = weight.shape or (1,), weight.factor_count or 0
    bias = len(rows) > 1
    flops = 2.0 * math.prod(shape) * max(1, count)
    alone = name == weight.layer
    if not count:
        return LayerSpec(name, "plain", shape, bias, flops, is_parameter=alone)
    if weight.counts_rows:
        look_ups = math.log1p(-min(count, shape[0] - 1) / shape[0]) / math.log1p(-1 / shape[0])
        return LayerSpec(name, "embedding", shape, bias, flops, max(1, round(look_ups)), is_parameter=alone)
    return LayerSpec(name, "fc", shape, bias, flops, count, is_parameter=alone)


def _cluster(records: Sequence[RunRecord], slowest: float) -> ClusterSpec:
    first = records[0]
    hosts = len(set(first.machines)) if first.machines else first.world_size
    known = [one.link_bytes_per_s for one in records if one.link_bytes_per_s is not None]
    if not known:
        raise InvalidArgument("this run has sent nothing between its workers, so nothing is known of its network")
    if first.world_size % hosts:
        raise InvalidArgument("this run has machines with different numbers of workers, which no prediction knows")
    dedicated = first.servers if first.placement == "dedicated" else 0
    products = [one.multiply_adds_per_s for one in records if one.multiply_adds_per_s is not None]
    spec = ClusterSpec(
        hosts=hosts,
        bits_per_second=_WHOLE_BITS,
        workers_per_host=first.world_size // hosts,
        servers=dedicated,
        slowest=slowest,
        latency_s=max(one.latency_s for one in records),
        products_per_s=min(products) if products else None,
    )
    return replace(spec, bits_per_second=_WHOLE_BITS * min(known) / spec.payload_bytes_per_s)


def _wire(plan: Sequence[PlanRow]) -> str:
    """How numbers travel, the same for all layers. What counts is their bytes, so gradients of 16 bits are as bf16."""
    dtypes = {row.dtype for row in plan}
    if dtypes <= _NARROW:
        return "bf16"
    wires = {row.wire for row in plan if row.scheme == "ps"} or {row.wire for row in plan}
    if dtypes != {"float32"} or len(wires) > 1:
        raise InvalidArgument(
            f"this run has gradients of {', '.join(sorted(dtypes))} that travel as {', '.join(sorted(wires))}: only "
            "runs in which all gradients travel alike can be predicted"
        )
    return wires.pop()


def _scheme(record: RunRecord) -> str:
    """The scheme that the program has asked for, by an option or as it wrapped its model."""
    asked = {row.scheme for row in record.plan if row.reason == CHOSEN_BY_USER}
    if len(asked) > 1:
        raise InvalidArgument(f"this run has layers for which {' and '.join(sorted(asked))} were asked: none is known")
    return asked.pop() if asked else str(record.options["scheme"])


def _exchange(record: RunRecord) -> Exchange:
    return Exchange.of_options(record.options, _scheme(record), _wire(record.plan), record.overlap)


def slow_port(records: Sequence[RunRecord]) -> tuple[int, float] | None:
    """The rank whose host's port is slow, and how many times as fast the others' ports are at least. None: none is.

    A slow port slows down every connection of its host, in one direction at least. All other hosts have a fast
    connection to somebody. What these carry is less than their ports can, because they carry the bytes to and from the
    slow port, too, and pause between exchanges. Only runs with one worker on each host are looked at.
    """
    sent, ranks = _sent(records), range(len(records))
    if len(records) < _LEAST_HOSTS or any((one, other) not in sent for one in ranks for other in ranks if one != other):
        return None
    best = [max(_pair(sent, rank, other) for other in ranks if other != rank) for rank in ranks]
    slow = min(ranks, key=best.__getitem__)
    if best[slow] > _SLOW * median(best[rank] for rank in ranks if rank != slow):
        return None
    fast = [rank for rank in ranks if rank != slow]
    usual = median(_port(sent, rank, [other for other in fast if other != rank]) for rank in fast)
    ratio = usual / _port(sent, slow, fast)
    return (slow, ratio) if ratio > 1 else None


def _sent(records: Sequence[RunRecord]) -> _Sent:
    """What ranks have sent to each other, as far as addresses tell the ranks."""
    owners: dict[str, list[int]] = {}
    for rank, record in enumerate(records):
        for address in record.addresses:
            owners.setdefault(address, []).append(rank)
    found = {}
    for rank, record in enumerate(records):
        for address, flow in record.sent.items():
            owner = owners.get(address, [])
            if len(owner) == 1 and owner != [rank]:
                found[rank, owner[0]] = flow
    return found


def _pair(sent: _Sent, one: int, other: int) -> float:
    """The bytes per second between two ranks, in the slower direction."""
    return min(size / seconds for size, seconds in (sent[one, other], sent[other, one]))


def _port(sent: _Sent, rank: int, others: Sequence[int]) -> float:
    """The bytes per second of a rank's port to and from these ranks, in the slower direction.

    Their connections share it, and are busy for about the same time.
    """
    out, into = [sent[rank, other] for other in others], [sent[other, rank] for other in others]
    return min(sum(size for size, _ in flows) / max(seconds for _, seconds in flows) for flows in (out, into))
