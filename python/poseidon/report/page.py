"""The page report.html, which needs no other file. It follows the reader's light or dark preference."""

from __future__ import annotations

import os
from collections.abc import Iterable
from html import escape
from pathlib import Path

from poseidon.report import charts
from poseidon.report.data import LayerRow, Report, hidden_share
from poseidon.report.layout import HALF_WIDTH, PAGE_WIDTH, cells, document, figure, figures, head, legend, section
from poseidon.report.svg import bytes_text, number_text, percent_text, seconds_text

_LATE_SHOWN = 3  # late workers that are named


def html(report: Report) -> str:
    """The whole page."""
    sections = [head(report.title, report.subtitle), figures(headlines(report))]
    if report.epochs:
        sections.append(_learning(report))
    if report.layers:
        sections.append(_bytes(report.layers))
    if any(record.spans for record in report.ranks):
        sections.append(_timeline(report))
    if report.layers:
        sections.append(_table(report.layers))
    entries = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in report.environment)
    sections.append(f'<section><h2>Environment</h2><dl class="environment">{entries}</dl></section>')
    return document(report.title, sections)


def write_html(report: Report, path: str | os.PathLike[str]) -> None:
    """Writes `html(report)` to `path`."""
    Path(path).write_text(html(report), encoding="utf-8")


def headlines(report: Report) -> list[tuple[str, str, str]]:
    """The figures at the top: name, value, and a value to compare it with."""
    shown: list[tuple[str, str, str]] = []
    if report.epochs:
        last = report.epochs[-1]
        duration = seconds_text(sum(epoch.duration_s for epoch in report.epochs))
        count = len(report.epochs)
        after = f"after {count} epoch{'s' if count > 1 else ''}, {duration}"
        shown.append(("Test accuracy", f"{100 * last.accuracy:.1f} %", after))
        rate = sum(epoch.images_per_s * epoch.duration_s for epoch in report.epochs)
        rate /= sum(epoch.duration_s for epoch in report.epochs) or 1
        shown.append(("Images per second", number_text(rate), f"{len(report.ranks)} workers together"))
    shown += _step(report)
    sent, dense = totals(report.layers)
    if sent:
        against = (
            f"{number_text(dense / sent)} times less than dense, {bytes_text(dense)}" if dense > sent else "as dense"
        )
        shown.append(("Sent per worker and step", bytes_text(sent), against))
    shown += _optimizer_memory(report)
    shown += _late_workers(report)
    share = overall_hidden(report)
    if share is not None:
        shown.append(
            (
                "Synchronization hidden",
                percent_text(share),
                "behind computation; waiting for slower workers counts against it",
            )
        )
    return shown


def _step(report: Report) -> list[tuple[str, str, str]]:
    own = report.step_s
    if own is None:
        return []
    others = (
        f"{seconds_text(other)} with {name}, {number_text(other / own)} times as long"
        for name, other in report.other_step_s.items()
    )
    return [("Time of a step", seconds_text(own), "; ".join(others) or "median, of the slowest rank")]


def _optimizer_memory(report: Report) -> list[tuple[str, str, str]]:
    here = max((record.optimizer_bytes for record in report.ranks), default=0)
    on_workers = max((record.worker_side_optimizer_bytes for record in report.ranks), default=0)
    if not on_workers:
        return []
    factor = f"{number_text(on_workers / here)} times less than" if here else "instead of"
    return [("Optimizer memory per worker", bytes_text(here), f"{factor} with the update on workers")]


def _late_workers(report: Report) -> list[tuple[str, str, str]]:
    late = sorted(report.ranks, key=lambda record: -record.late_steps)
    if not late or not late[0].late_steps:
        return []
    texts = [f"rank {record.rank}: {record.late_steps}" for record in late if record.late_steps]
    more = f" and {len(texts) - _LATE_SHOWN} more" if len(texts) > _LATE_SHOWN else ""
    total = sum(record.late_steps for record in late)
    return [("Gradients left out", str(total), f"late workers’ steps: {', '.join(texts[:_LATE_SHOWN])}{more}")]


def totals(layers: Iterable[LayerRow]) -> tuple[float, float]:
    """Bytes sent, and bytes that the dense exchange would have sent, summed over the layers."""
    rows = list(layers)
    return sum(row.bytes_sent for row in rows), sum(row.dense_bytes for row in rows)


def overall_hidden(report: Report) -> float | None:
    """`hidden_share` of all layers together, mean over the ranks."""
    shares = [
        hidden_share((s for s in record.spans if s.kind == "synchronization"), record.spans) for record in report.ranks
    ]
    known = [share for share in shares if share is not None]
    return sum(known) / len(known) if known else None


def _learning(report: Report) -> str:
    loss = figure(lambda width: charts.loss_chart(report.losses, report.epochs, width), HALF_WIDTH)
    accuracy = figure(lambda width: charts.accuracy_chart(report.epochs, width), HALF_WIDTH)
    return (
        '<section class="pair">'
        f"<div><h2>Training loss</h2><p>Rank 0’s share of the examples.</p>{loss}</div>"
        f"<div><h2>Test accuracy</h2><p>After each epoch, on the whole test set.</p>{accuracy}</div></section>"
    )


def _scheme_entries(layers: Iterable[LayerRow]) -> list[tuple[str, str]]:
    schemes = dict.fromkeys(row.scheme for row in layers)
    return [(charts.scheme_style(scheme), charts.scheme_title(scheme)) for scheme in schemes]


def _bytes(layers: list[LayerRow]) -> str:
    note = f" The {charts.ROW_LIMIT} largest of {len(layers)} layers." if len(layers) > charts.ROW_LIMIT else ""
    colours = legend([*_scheme_entries(layers), ("dense", "what dense gradients would take")])
    words = f"Sent per step by one worker together with its shard, headers included.{note}"
    picture = figure(lambda width: charts.bytes_chart(layers, width), PAGE_WIDTH)
    return section("Bytes by layer", words, colours + picture)


def _timeline(report: Report) -> str:
    record = next(record for record in report.ranks if record.spans)
    kinds = {span.kind for span in record.spans}
    names = [("forward", "forward"), ("backward", "backward"), ("wait", "wait for exchanges"), ("update", "update")]
    entries = [entry for entry in names if entry[0] in kinds]
    schemes = [(style, f"synchronization: {name}") for style, name in _scheme_entries(report.layers)]
    colours = legend([*entries, *schemes, ("limit", "end of backward")])
    words = (
        f"A step of median length on rank {record.rank}. A layer’s synchronization starts as soon as its backward is "
        "done; what lies left of the dashed line is hidden behind computation."
    )
    return section("One step", words, colours + figure(lambda width: charts.timeline_chart(record, width), PAGE_WIDTH))


def _table(layers: list[LayerRow]) -> str:
    heads = ("Layer", "Shape", "Factors", "Scheme", "Sent", "Dense", "Share", "Hidden", "Predicted", "Measured")
    rows = "".join(_table_row(row) for row in layers)
    sent, dense = totals(layers)
    total = ("All", "", "", "", bytes_text(sent), bytes_text(dense), percent_text(sent / dense if dense else None))
    words = (
        "In the order in which backward finishes them. Bytes are those of one step; “hidden” is the share of a layer’s "
        "synchronization during which the model still computed. Predicted and measured are the time of a layer’s "
        "synchronization from when its gradient exists."
    )
    return section(
        "Layers",
        words,
        f'<div class="scroll"><table class="layers"><thead><tr>{cells(heads, "th")}<th class="why">Why</th></tr>'
        f"</thead><tbody>{rows}</tbody><tfoot><tr>{cells((*total, '', '', '', ''), 'td')}</tr></tfoot></table></div>",
    )


def _table_row(row: LayerRow) -> str:
    share = row.bytes_sent / row.dense_bytes if row.dense_bytes else None
    times = ("–" if time is None else f"{time * 1e3:.1f} ms" for time in (row.predicted_s, row.measured_s))
    texts = (bytes_text(row.bytes_sent), bytes_text(row.dense_bytes), percent_text(share), percent_text(row.hidden))
    return (
        f'<tr><td class="name">{escape(row.name)}</td>'
        + cells((row.shape_text, str(row.factor_count) if row.factor_count else "–"), "td")
        + f'<td><i class="{charts.scheme_style(row.scheme)}"></i>{escape(row.scheme)}</td>'
        + cells((*texts, *times), "td")
        + f'<td class="why">{escape(row.reason)}</td></tr>'
    )
