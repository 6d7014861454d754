"""A predicted step as a trace that Perfetto opens, in the format of a run's (`poseidon.report`)."""

from __future__ import annotations

from pathlib import Path

from poseidon.planner.clock import PRODUCT
from poseidon.planner.predict import Prediction
from poseidon.report import LayerRow, RankRecord, Report, Span, write_trace

_NS = 1e9


def write_prediction(prediction: Prediction, path: Path) -> None:
    """Writes the slowest worker's step: its layers, its products of factors, and the exchange of each unit."""
    report = Report(prediction.table.name, str(prediction.cluster), [], [], [], [record_of(prediction)])
    write_trace(report, path)


def record_of(prediction: Prediction) -> RankRecord:
    """The slowest worker's step as a run's report has it."""
    names = [layer.name for layer in prediction.table.layers]
    ready = prediction.ready_s
    spans, rows = [], []
    for work in prediction.ran:
        kind = "update" if work.what == PRODUCT else work.what
        name = prediction.loads[work.of].unit.name if work.what == PRODUCT else names[work.of]
        spans.append(span_of(kind, work.begin_s, work.end_s, name))
    for load, completed_s in zip(prediction.loads, prediction.completed_s, strict=True):
        spans.append(span_of("synchronization", ready[min(load.unit.places)], completed_s, load.unit.name))
        rows.append(LayerRow(load.unit.name, (), load.unit.factor_count, load.scheme, load.sent_bytes, 0.0, None))
    return RankRecord(0, "simulation", 0, rows, spans)


def span_of(kind: str, begin_s: float, end_s: float, name: str) -> Span:
    """A span of simulated time."""
    return Span(kind, 0, round(begin_s * _NS), round(end_s * _NS), name)
