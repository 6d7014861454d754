"""A chain of activities in time, each of which began when the one before it ended: a row for each place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from poseidon.report.charts import BAR, rows_in_time
from poseidon.report.svg import Canvas, number_text


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
    canvas, across, tops = rows_in_time(places, end_s * 1e3, width, label)
    top_of = dict(zip(places, tops, strict=True))
    for link in links:
        from_ms, to_ms = link.begin_s * 1e3, link.end_s * 1e3
        tip = f"{link.tip}: {number_text(to_ms - from_ms)} ms"
        canvas.rect(
            across(from_ms), top_of[link.place], max(0.5, across(to_ms) - across(from_ms)), BAR, link.style, tip
        )
    return canvas
