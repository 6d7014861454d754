"""Turns what a framework adapter recorded into the data of a report."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from poseidon.report.data import LayerRow, RankRecord, Span, hidden_share
from poseidon.schemes import SCHEMES

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
