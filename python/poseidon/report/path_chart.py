"""A chain of activities in time, each of which began when the one before it ended: a row for each place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from poseidon.report.charts import BAR, LABEL_WIDTH, NARROW, ROW, TALL_ROW
from poseidon.report.svg import Canvas, Scale, number_text, short_names, ticks


@dataclass(frozen=True)
class Link:
    """A part of the chain. `style` is a class of the style sheet; `tip` is shown when the pointer is over it."""

    place: str
    begin_s: float
    end_s: float
    style: str
    tip: str


def path_chart(links: Sequence[Link], end_s: float, width: float, label: str) -> Canvas:
    """The chain from 0 to `end_s`. Places are in the order in which they come first."""
    places = list(dict.fromkeys(link.place for link in links))
    narrow = width < NARROW
    row_height, left = (TALL_ROW, 0.0) if narrow else (ROW, float(LABEL_WIDTH))
    height = row_height * len(places) + 44
    canvas = Canvas(width, height, label)
    across = Scale(0, end_s * 1e3, left, width - 16)
    bottom = height - 40
    for time_ms in ticks(0, end_s * 1e3, count=4 if narrow else 8):
        canvas.line(across(time_ms), 0, across(time_ms), bottom, "grid")
        anchor = "middle" if time_ms or not narrow else "start"
        canvas.text(across(time_ms), bottom + 16, number_text(time_ms), "tick", anchor)
    canvas.text((left + width - 16) / 2, height - 4, "milliseconds", "tick", "middle")
    names = short_names(places, width if narrow else left - 10)
    tops = {place: row_height * row + (18 if narrow else (ROW - BAR) / 2) for row, place in enumerate(places)}
    for place, top in tops.items():
        x, anchor = (0.0, "start") if narrow else (left - 10, "end")
        canvas.text(x, top - 5 if narrow else top + 10, names[place], "label", anchor)
    for link in links:
        from_ms, to_ms = link.begin_s * 1e3, link.end_s * 1e3
        tip = f"{link.tip}: {number_text(to_ms - from_ms)} ms"
        canvas.rect(across(from_ms), tops[link.place], max(0.5, across(to_ms) - across(from_ms)), BAR, link.style, tip)
    return canvas
