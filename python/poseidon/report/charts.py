"""The report's pictures. Each takes a width, so that a page can have one for a desktop and one for a phone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from poseidon.report.data import Epoch, LayerRow, RankRecord, Span, typical_step
from poseidon.report.svg import CHARACTER_WIDTH, Canvas, Scale, bytes_text, number_text, short_names, ticks
from poseidon.schemes import SCHEMES

LINE_POINTS = 160  # a curve is thinned to so many means
ROW_LIMIT = 24  # layers in one picture; the table has them all
NARROW = 500  # below this width a row's label stands above its bar
TOP, BOTTOM, LEFT, RIGHT = 14, 40, 46, 14  # margins of the two curves
ROW, TALL_ROW, BAR = 26, 38, 12
LABEL_WIDTH = 190
MOST_LABEL_WIDTH = 0.4  # of a picture's width, for words that are longer
_VALUE_WIDTH = 148.0  # of the words beside a bar
_TIME_AXIS = 40  # the height of what is below the rows


def loss_chart(losses: Sequence[float], epochs: Sequence[Epoch], width: float) -> Canvas:
    """The training loss over the epochs: means of neighbouring steps."""
    stride = max(1, len(losses) // LINE_POINTS)
    groups = [losses[at : at + stride] for at in range(0, len(losses), stride)]
    per_epoch = len(losses) / max(1, len(epochs))
    points = [
        ((index * stride + len(group) / 2) / per_epoch, statistics.fmean(group)) for index, group in enumerate(groups)
    ]
    high = max([y for _, y in points] + [0.1])
    return _curve(points, [], max(1, len(epochs)), (0, high * 1.05), number_text, "Training loss by epoch", width)


def accuracy_chart(epochs: Sequence[Epoch], width: float) -> Canvas:
    """The test accuracy after each epoch."""
    points = [(float(epoch.number), 100 * epoch.accuracy) for epoch in epochs]
    marks = [(x, y, f"{y:.1f} %") for x, y in points]
    lowest = min((y for _, y in points), default=0)
    floor = max(0.0, 10 * ((lowest - 5) // 10))
    return _curve(
        points, marks, max(1, len(epochs)), (floor, 100), lambda y: f"{y:g} %", "Test accuracy by epoch", width
    )


def _curve(
    points: Sequence[tuple[float, float]],
    marks: Sequence[tuple[float, float, str]],
    last: float,
    bounds: tuple[float, float],
    write: Callable[[float], str],
    label: str,
    width: float,
) -> Canvas:
    height = 220.0
    canvas = Canvas(width, height, label)
    across = Scale(0, last, LEFT, width - RIGHT - (14 if marks else 0))
    up = Scale(bounds[0], bounds[1], height - BOTTOM, TOP)
    for y in ticks(*bounds, count=4):
        canvas.line(LEFT, up(y), width - RIGHT, up(y), "grid")
        canvas.text(LEFT - 8, up(y) + 4, write(y), "tick", "end")
    for x in (x for x in ticks(0, last, count=6) if x == int(x)):
        canvas.text(across(x), height - BOTTOM + 18, f"{x:.0f}", "tick", "middle")
    canvas.text((LEFT + width - RIGHT) / 2, height - 4, "epoch", "tick", "middle")
    canvas.polyline([(across(x), up(y)) for x, y in points], "curve")
    for x, y, text in marks:
        canvas.dot(across(x), up(y), "dot", text)
        canvas.text(across(x), up(y) - 9, text, "mark", "middle")
    return canvas


def bytes_chart(layers: Sequence[LayerRow], width: float) -> Canvas:
    """One bar per layer: what was sent, in front of what the dense exchange would have sent."""
    bars = []
    for row in largest(layers):
        value = f"{bytes_text(row.bytes_sent)} of {bytes_text(row.dense_bytes)}"
        tip = f"{row.name} ({row.scheme}): {value}"
        bars.append(_Bar(row.name, row.bytes_sent, row.dense_bytes, scheme_style(row.scheme), value, tip))
    most = max([max(bar.value, bar.behind or 0.0) for bar in bars] + [1.0])
    return _bars(bars, most, width, LABEL_WIDTH, "Bytes sent by layer, against dense")


class _Bar(NamedTuple):
    """A bar in front of a grey one that ends at `behind` (None: of none), with words beside it."""

    name: str
    value: float
    behind: float | None
    style: str
    words: str
    tip: str


def _bars(bars: Sequence[_Bar], most: float, width: float, label_width: float, label: str) -> Canvas:
    """A row for each bar, on an axis that ends at `most`."""
    narrow = width < NARROW
    row_height, left = (TALL_ROW, 0.0) if narrow else (ROW, float(label_width))
    canvas = Canvas(width, row_height * len(bars) + 8, label)
    across = Scale(0, most, left, width - (2 if narrow else _VALUE_WIDTH))
    names = short_names((bar.name for bar in bars), width - _VALUE_WIDTH if narrow else left - 10)
    for index, bar in enumerate(bars):
        top = row_height * index + (18 if narrow else (ROW - BAR) / 2)
        if bar.behind is not None:
            canvas.rect(left, top, across(bar.behind) - left, BAR, "dense", bar.tip)
        canvas.rect(left, top, max(1.5, across(bar.value) - left), BAR, bar.style, bar.tip)
        end = across(max(bar.value, bar.behind or 0.0))
        _bar_texts(canvas, top, left, end, names[bar.name], bar.words)
    return canvas


def _bar_texts(canvas: Canvas, top: float, left: float, end: float, name: str, value: str) -> None:
    """The texts of a bar: left and right of it, or above it on a phone."""
    if left:
        canvas.text(left - 10, top + 10, name, "label", "end")
        canvas.text(end + 8, top + 10, value, "tick")
    else:
        canvas.text(0, top - 5, name, "label")
        canvas.text(canvas.width, top - 5, value, "tick", "end")


def bars_chart(
    rows: Sequence[tuple[str, float, str]], width: float, label: str, most: float = 0.0, grey: Collection[str] = ()
) -> Canvas:
    """One bar per row: its name, its value, and the value in words. The axis ends at `most`, or at the largest.

    The rows of the names in `grey` are those beside which the others are shown.
    """
    longest = max(len(name) for name, _, _ in rows) * CHARACTER_WIDTH + 10 + CHARACTER_WIDTH
    wide = max(LABEL_WIDTH, min(longest, MOST_LABEL_WIDTH * width))
    bars = [
        _Bar(name, value, most or None, "backward" if name in grey else "scheme-1", words, f"{name}: {words}")
        for name, value, words in rows
    ]
    return _bars(bars, max([most, *(bar.value for bar in bars)]), width, wide, label)


def timeline_chart(record: RankRecord, width: float) -> Canvas:
    """One typical step of a rank with spans: its passes on top, then each layer's backward and synchronization."""
    step = typical_step(record)
    spans = [span for span in record.spans if span.step == step]
    schemes = {row.name: row.scheme for row in record.layers}
    rows = _timeline_rows(spans)
    start = min(span.start_ns for span in spans)
    end = max(span.end_ns for span in spans)
    names = [name for name, _ in rows]
    canvas, across, tops = rows_in_time(names, (end - start) / 1e6, width, "Timeline of a typical step")
    for (name, parts), top in zip(rows, tops, strict=True):
        for span in parts:
            style = scheme_style(schemes.get(name, "")) if span.kind == "synchronization" else span.kind
            from_ms, to_ms = ((at - start) / 1e6 for at in (span.start_ns, span.end_ns))
            tip = f"{name}: {span.kind}, {number_text(to_ms - from_ms)} ms"
            canvas.rect(across(from_ms), top, max(1.0, across(to_ms) - across(from_ms)), BAR, style, tip)
    passed = [span.end_ns for span in spans if span.kind == "backward" and not span.layer]
    if passed:
        x = across((max(passed) - start) / 1e6)
        canvas.line(x, 0, x, canvas.height - _TIME_AXIS, "limit")
    return canvas


def rows_in_time(names: Sequence[str], end_ms: float, width: float, label: str) -> tuple[Canvas, Scale, list[float]]:
    """A picture with a row for each name over milliseconds from 0 to `end_ms`: the canvas, the scale of its time axis,
    and where each row's bar begins from above."""
    narrow = width < NARROW
    row_height, left = (TALL_ROW, 0.0) if narrow else (ROW, float(LABEL_WIDTH))
    canvas = Canvas(width, row_height * len(names) + _TIME_AXIS + 4, label)
    across = Scale(0, end_ms, left, width - 16)
    bottom = canvas.height - _TIME_AXIS
    for time_ms in ticks(0, end_ms, count=4 if narrow else 8):
        canvas.line(across(time_ms), 0, across(time_ms), bottom, "grid")
        anchor = "middle" if time_ms or not narrow else "start"
        canvas.text(across(time_ms), bottom + 16, number_text(time_ms), "tick", anchor)
    canvas.text((left + width - 16) / 2, canvas.height - 4, "milliseconds", "tick", "middle")
    tops = [row_height * row + (18 if narrow else (ROW - BAR) / 2) for row in range(len(names))]
    short = short_names(names, width if narrow else left - 10)
    x, anchor = (0.0, "start") if narrow else (left - 10, "end")
    for name, top in zip(names, tops, strict=True):
        canvas.text(x, top - 5 if narrow else top + 10, short[name], "label", anchor)
    return canvas, across, tops


def _timeline_rows(spans: Sequence[Span]) -> list[tuple[str, list[Span]]]:
    """The model's row and the layers' rows, in the order in which their synchronization starts."""
    model = [span for span in spans if not span.layer]
    synchronized = [span for span in spans if span.kind == "synchronization"]
    longest = sorted(synchronized, key=lambda span: span.duration_ns, reverse=True)[:ROW_LIMIT]
    rows = [("compute", model)] if model else []
    for span in sorted(longest, key=lambda span: span.start_ns):
        rows.append((span.layer, [other for other in spans if other.layer == span.layer]))
    return rows


def largest(layers: Sequence[LayerRow]) -> list[LayerRow]:
    """The `ROW_LIMIT` layers with most dense bytes, in the table's order."""
    kept = sorted(layers, key=lambda row: row.dense_bytes, reverse=True)[:ROW_LIMIT]
    return [row for row in layers if row in kept]


_SCHEME_COLOURS = 3  # of style.css


def scheme_style(scheme: str) -> str:
    """The style class of a scheme's colour: the schemes take the colours of style.css in turn."""
    number = list(SCHEMES).index(scheme) + 1 if scheme in SCHEMES else 0
    return f"scheme-{number}" if 1 <= number <= _SCHEME_COLOURS else "scheme-other"


def scheme_title(scheme: str) -> str:
    """What readers see of a scheme, e.g. "parameter server (ps)"."""
    return f"{SCHEMES[scheme].title} ({scheme})" if scheme in SCHEMES else scheme
