"""A predicted step as a trace that Perfetto opens, in the format of a run's (`poseidon.report`)."""

from __future__ import annotations

from pathlib import Path

from poseidon.planner.predict import Prediction
from poseidon.report import LayerRow, RankRecord, Report, Span, write_trace

_NS = 1e9


def write_prediction(prediction: Prediction, path: Path) -> None:
    """Writes the slowest worker's step: its layers, its products of factors, and the exchange of each unit."""
    names = [layer.name for layer in prediction.table.layers]
    ready = {work.of: work.end_s for work in prediction.ran if work.what == "backward"}
    spans, rows = [], []
    for work in prediction.ran:
        kind = "update" if work.what == "product" else work.what
        name = prediction.loads[work.of].unit.name if work.what == "product" else names[work.of]
        spans.append(_span(kind, work.begin_s, work.end_s, name))
    for load, completed_s in zip(prediction.loads, prediction.completed_s, strict=True):
        spans.append(_span("synchronization", ready[min(load.unit.places)], completed_s, load.unit.name))
        rows.append(LayerRow(load.unit.name, (), load.unit.factor_count, load.scheme, load.sent_bytes, 0.0, None))
    record = RankRecord(0, "simulation", 0, rows, spans)
    write_trace(Report(prediction.table.name, str(prediction.cluster), [], [], [], [record]), path)


def _span(kind: str, begin_s: float, end_s: float, name: str) -> Span:
    return Span(kind, 0, round(begin_s * _NS), round(end_s * _NS), name)
