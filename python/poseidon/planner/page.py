"""A plan as a page that needs no other file: the verdict, charts, and the tables of `poseidon plan`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from poseidon.planner.clock import PRODUCT
from poseidon.planner.critical_path import critical_path, path_words
from poseidon.planner.path_page import path_picture
from poseidon.planner.predict import Prediction
from poseidon.planner.report import PlanReport
from poseidon.planner.trace import record_of, span_of
from poseidon.report import RankRecord, Span
from poseidon.report.charts import bars_chart, scheme_style, scheme_title, timeline_chart
from poseidon.report.layout import PAGE_WIDTH, document, figure, figures, head, legend, paragraphs, section, table
from poseidon.report.svg import bytes_text, number_text, percent_text, seconds_text

_STYLES = {
    "backward": "backward pass",
    "forward": "next forward pass",
    "wait": "waits",
    "update": "products of factors",
}


def write_page(report: PlanReport, path: Path) -> None:
    """Writes the plan as HTML with its charts. Raises OSError if the file cannot be written."""
    title = f"Plan: {report.model}"
    sections = [head(title, report.verdict), figures(_headlines(report)), _efficiency(report)]
    if report.changes:
        sections.append(_changes(report))
    if report.units:
        sections += [_timeline(report.step), _path(report.step), _layers(report)]
    if report.racks is not None:
        words = (
            "The slowest ports, in each direction, with which dense gradients hide behind computation, by where the "
            "parameter server stands (Parameter Hub, Figure 4)."
        )
        sections.append(section("Where servers stand", words, table(*report.racks.table())))
    first, *others = report.notes()  # which says where the step's own time is from
    sections.append(section("Notes", first, paragraphs(others)))
    path.write_text(document(title, sections), encoding="utf-8")


def _headlines(report: PlanReport) -> Iterator[tuple[str, str, str]]:
    last, sample = report.scaling[-1], report.step.table.sample
    yield "Speed", f"{number_text(last.speedup)} ×", f"one host, with {last.hosts}"
    yield "Efficiency", percent_text(last.efficiency), "a worker's own step over this step"
    yield "Step", seconds_text(last.step_s), f"{last.workers} workers"
    yield "Samples per second", f"{last.samples_per_s:,.0f}", f"a sample is one {sample}"


def _efficiency(report: PlanReport) -> str:
    rows = [
        (f"{row.hosts} host{'s' * (row.hosts > 1)}", row.efficiency, f"{number_text(row.speedup)} × one host")
        for row in report.scaling
    ]
    picture = figure(lambda width: bars_chart(rows, width, "Efficiency by number of hosts", 1.0), PAGE_WIDTH)
    priced = report.cluster.price > 0
    heads = ["Hosts", "Workers", "Step", "Samples/s", "× one host", "Efficiency", *["Samples/$"] * priced]
    texts = [row.cells(seconds_text(row.step_s)) for row in report.scaling]
    words = "Which part of each step is a worker's own computation. A full bar is linear scaling."
    return section("Efficiency by number of hosts", words, picture + table(heads, texts))


def _changes(report: PlanReport) -> str:
    """How many times one host each change gives, below the cluster as it is."""
    each = report.scaling[-1].speedup / report.step.samples_per_s
    gains = [("as described", report.step), *((change.words, change.prediction) for change in report.changes)]
    speeds = [(words, step.samples_per_s * each) for words, step in gains]
    rows = [(words, speed, f"{number_text(speed)} × one host") for words, speed in speeds]
    picture = figure(lambda width: bars_chart(rows, width, "What would help"), PAGE_WIDTH)
    return section("What would help", "Samples per second over those of one host.", picture)


def _timeline(step: Prediction) -> str:
    record = _with_passes(step)
    kinds = {span.kind for span in record.spans}
    schemes = dict.fromkeys(load.scheme for load in step.loads)
    colours = legend(
        [
            *((style, words) for style, words in _STYLES.items() if style in kinds),
            *((scheme_style(scheme), f"exchange: {scheme_title(scheme)}") for scheme in schemes),
            ("limit", "end of the backward pass"),
        ]
    )
    words = (
        "The slowest worker, from the begin of a backward pass. The longest exchanges are shown; "
        "what lies left of the dashed line is hidden behind computation."
    )
    return section("One step", words, colours + figure(lambda width: timeline_chart(record, width), PAGE_WIDTH))


def _path(step: Prediction) -> str:
    parts = critical_path(step)
    words = "What the step waits for, one after the other: only a change of these makes it shorter. "
    return section("Critical path", words + path_words(parts) + ".", path_picture(parts))


def _with_passes(step: Prediction) -> RankRecord:
    """The step's record with what the accelerator does as a whole, and where it waits."""
    passes, now = list[Span](), 0.0
    own = [work for work in step.ran if work.what != PRODUCT or step.cluster.products_per_s is None]
    for work in sorted(own, key=lambda work: work.begin_s):
        kind = "update" if work.what == PRODUCT else work.what
        if work.begin_s - now > 1e-9:
            passes.append(span_of("wait", now, work.begin_s, ""))
        now = work.end_s
        begin_s = work.begin_s
        if passes and passes[-1].kind == kind:
            begin_s = passes.pop().start_ns / 1e9
        passes.append(span_of(kind, begin_s, now, ""))
    record = record_of(step)
    return replace(record, spans=[*passes, *record.spans])


def _layers(report: PlanReport) -> str:
    heads = ["Layer or group", "Scheme", "Sent", "Exchange", "Hidden", "Why"]
    rows = [
        [row.name, row.scheme, bytes_text(row.sent_bytes), seconds_text(row.exchange_s), row.hidden, row.why]
        for row in report.units
    ]
    words = "In the order in which the backward pass finishes them. Bytes are those that one host's port sends."
    return section("Layers", words, table(heads, rows))
