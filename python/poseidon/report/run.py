"""Turns what a framework adapter recorded into the data of a report, also of a whole run (option `record`)."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING

from poseidon.adapter.run_record import RunRecord
from poseidon.rates import rate_text
from poseidon.report.data import LayerRow, RankRecord, Report, Span, hidden_share
from poseidon.schemes import SCHEMES
from poseidon.version import VERSION

if TYPE_CHECKING:
    from poseidon.adapter.plan_table import PlanRow
    from poseidon.adapter.stats import LayerSynchronization, StepRecord
    from poseidon.torch.optimizer.distributed_optimizer import OptimizerMemory


def rank_record(
    rank: int,
    host: str,
    worker_count: int,
    plan: Sequence[PlanRow],
    steps: Sequence[StepRecord],
    passes: Iterable[Span],
    first_step: int = 0,
    optimizer: OptimizerMemory | None = None,
    late_steps: int = 0,
) -> RankRecord:
    """One rank's record, for a job whose workers host the shards.

    `plan` is `model.plan()` and `steps` is `model.recorded_steps()`, of which the first is step `first_step` of the
    run. `passes` are the forward, backward and update spans of the same steps as the training loop saw them: its
    backward includes the wait for exchanges, which is split off here. `optimizer` is `DistributedOptimizer.memory()`,
    `late_steps` this rank's number in `poseidon.torch.straggler_report()`.
    """
    ends = {first_step + index: step.backward_end_ns for index, step in enumerate(steps)}
    spans = [part for span in passes for part in _without_wait(span, ends.get(span.step))]
    for number, step in enumerate(steps, start=first_step):
        spans += _layer_spans(number, step)
    record = RankRecord(rank, host, 0, _rows(worker_count, plan, steps, spans), spans)
    if optimizer is not None:
        record.optimizer_bytes, record.worker_side_optimizer_bytes = optimizer.this_process, optimizer.worker_side
    record.late_steps = late_steps
    return record


def _without_wait(span: Span, backward_end_ns: int | None) -> list[Span]:
    if span.kind != "backward" or backward_end_ns is None or not span.start_ns <= backward_end_ns < span.end_ns:
        return [span]
    return [
        Span("backward", span.step, span.start_ns, backward_end_ns),
        Span("wait", span.step, backward_end_ns, span.end_ns),
    ]


def _layer_spans(number: int, step: StepRecord) -> list[Span]:
    spans = []
    ready_ns = step.backward_begin_ns
    for layer in sorted(step.layers, key=lambda layer: layer.gradient_ready_ns):
        spans.append(Span("backward", number, ready_ns, max(ready_ns, layer.gradient_ready_ns), layer.name))
        ready_ns = max(ready_ns, layer.gradient_ready_ns)
        if layer.completed_ns >= layer.started_ns:
            spans.append(Span("synchronization", number, layer.started_ns, layer.completed_ns, layer.name))
    return spans


def _rows(
    worker_count: int, plan: Sequence[PlanRow], steps: Sequence[StepRecord], spans: Sequence[Span]
) -> list[LayerRow]:
    """A row for each layer of the plan, in the order of backward."""
    recorded: dict[str, list[LayerSynchronization]] = {}
    for step in steps:
        for layer in step.layers:
            recorded.setdefault(layer.name, []).append(layer)
    planned = {row.layer: row for row in reversed(plan)}
    whole = [span for span in spans if not span.layer]
    rows = []
    for name in dict.fromkeys([*recorded, *planned]):
        row, layers = planned[name], recorded.get(name, [])
        own = [span for span in spans if span.kind == "synchronization" and span.layer == name]
        rows.append(
            LayerRow(
                name,
                row.shape,
                # The most common of both: an epoch's last batch may be smaller than the others.
                -(-statistics.mode(layer.factor_count for layer in layers) // worker_count)
                if layers and row.factor_count
                else 0,
                statistics.mode(layer.scheme for layer in layers) if layers else row.scheme,
                statistics.fmean(map(_bytes_sent, layers)) if layers else 0.0,
                row.dense_bytes / 2,  # the plan counts both directions, of which a node sends one
                hidden_share(own, whole),
                row.predicted_seconds,
                statistics.median(layer.seconds for layer in layers) if layers else None,
                row.reason,
            )
        )
    return rows


def _bytes_sent(layer: LayerSynchronization) -> int:
    """The bytes that the worker and its shard sent.

    All shards together send what all workers receive. So in the mean over the ranks, the answers that this worker
    received count for those that its own shard sent."""
    return layer.bytes_sent + (layer.bytes_received if SCHEMES[layer.scheme].uses_servers else 0)


def report_of_run(records: Sequence[RunRecord], other_step_s: Mapping[str, float] | None = None) -> Report:
    """The report. `records` are those of all ranks, by rank (`load_run`).

    `other_step_s` has the steps of other methods beside which the run is shown, by name.
    """
    first = records[0]
    origins = _origins(records)
    hosts = len({record.host for record in records})
    given = {name: value for name, value in first.options.items() if name in ("scheme", "wire", "lossy", "schedule")}
    rate = first.link_bytes_per_s
    steps = f"steps {first.first_step} to {first.first_step + len(first.steps) - 1}"
    return Report(
        title=first.title,
        subtitle=f"{steps.capitalize()} of {first.world_size} workers on {hosts} host{'s' * (hosts > 1)}.",
        environment=[
            ("Job", first.job),
            ("Hosts", ", ".join(dict.fromkeys(record.host for record in records))),
            ("Ports carried", "not known" if rate is None else rate_text(8 * rate)),
            *((name, str(value)) for name, value in given.items() if value != ""),
            ("Poseidon", VERSION),
        ],
        epochs=[],
        losses=[],
        other_step_s=dict(other_step_s or {}),
        ranks=[replace(_rank(record), origin_ns=origins[record.boot]) for record in records],
    )


def _origins(records: Sequence[RunRecord]) -> dict[str, int]:
    """What each machine's clock said when that of rank 0 said 0.

    A result comes to all workers at about the same time, so clocks differ by what the times of results differ by.
    """
    first = records[0]
    origins = {first.boot: 0}
    for record in records:
        if record.boot not in origins:
            pairs = zip(_completed(record), _completed(first), strict=False)
            origins[record.boot] = round(statistics.median([own - other for own, other in pairs]))
    return origins


def _completed(record: RunRecord) -> Iterator[int]:
    """When each layer's result was there, in an order that all ranks have."""
    for step in record.steps:
        yield from (layer.completed_ns for layer in sorted(step.layers, key=lambda layer: layer.name))


def _rank(record: RunRecord) -> RankRecord:
    passes = list(_passes(record))
    return rank_record(
        record.rank, record.host, record.world_size, record.plan, record.steps, passes, record.first_step
    )


def _passes(record: RunRecord) -> Iterator[Span]:
    """What the training loop does. The optimizer and the next input come between two steps."""
    for number, (step, later) in enumerate(zip_longest(record.steps, record.steps[1:]), record.first_step):
        # With overlap it is the next forward pass that waits.
        end_ns = step.backward_end_ns + (0 if record.overlap else step.waited_ns)
        forward_ns = min(step.forward_begin_ns or step.backward_begin_ns, step.backward_begin_ns)
        yield Span("forward", number, forward_ns, step.backward_begin_ns)
        yield Span("backward", number, step.backward_begin_ns, end_ns)
        if later is not None and end_ns < later.forward_begin_ns:
            yield Span("update", number, end_ns, later.forward_begin_ns)
