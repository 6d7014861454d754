"""Critical paths as pictures, and `poseidon what-if` as a page that needs no other file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from poseidon.planner.clock import BACKWARD, FORWARD, PRODUCT
from poseidon.planner.critical_path import Part, path_words
from poseidon.planner.what_if import Outcome, WhatIf
from poseidon.report.charts import BAR, bars_chart, rows_in_time
from poseidon.report.layout import PAGE_WIDTH, document, figure, figures, head, section, table
from poseidon.report.svg import Canvas, number_text, percent_text, seconds_text

_STYLES = {BACKWARD: "backward", FORWARD: "forward", PRODUCT: "update"}


def path_picture(parts: Sequence[Part]) -> str:
    """A critical path, a row for each resource on it."""
    return figure(lambda width: _path_chart(parts, width), PAGE_WIDTH)


def _path_chart(parts: Sequence[Part], width: float) -> Canvas:
    """The path from 0 to its end. Places are in the order in which they come first."""
    places = list(dict.fromkeys(part.place for part in parts))
    canvas, across, tops = rows_in_time(places, parts[-1].end_s * 1e3, width, "Critical path of a step")
    top_of = dict(zip(places, tops, strict=True))
    for part in parts:
        from_ms, to_ms = part.begin_s * 1e3, part.end_s * 1e3
        tip = f"{part.name}, {part.what}: {number_text(to_ms - from_ms)} ms"
        style, length = _STYLES.get(part.what, "scheme-1"), max(0.5, across(to_ms) - across(from_ms))
        canvas.rect(across(from_ms), top_of[part.place], length, BAR, style, tip)
    return canvas


def write_what_if(found: WhatIf, path: Path) -> None:
    """Writes what was predicted of a run as HTML. Raises OSError if the file cannot be written."""
    title = f"What if: {found.run.title}"
    sections = [head(title, " ".join(found.sentences())), figures(_headlines(found)), _speeds(found)]
    sections += [_path(outcome) for outcome in (found.now, found.best)]
    path.write_text(document(title, sections), encoding="utf-8")


def _headlines(found: WhatIf) -> Iterator[tuple[str, str, str]]:
    yield "Step", seconds_text(found.run.step_s), "measured, the slowest rank"
    yield "Simulated", seconds_text(found.now.step.step_s), f"{found.error:+.1%}"
    waits = sum(found.now.step.exposed_s) / found.now.step.step_s
    yield "Waits for exchanges", percent_text(waits), "of the simulated step"
    yield "The best change", f"{number_text(found.speed(found.best))} ×", found.best.words


def _speeds(found: WhatIf) -> str:
    rows = [(one.words, found.speed(one), f"{number_text(found.speed(one))} ×") for one in (found.now, *found.changes)]
    picture = figure(lambda width: bars_chart(rows, width, "Speed of each change"), PAGE_WIDTH)
    texts = [
        [one.words, seconds_text(one.step.step_s), f"{number_text(found.speed(one))} ×", str(one.step.cluster.workers)]
        for one in (found.now, *found.changes)
    ]
    words = "Samples per second over those of the run as it was, where each worker keeps its batch."
    return section("Speed", words, picture + table(["Change", "Step", "Speed", "Workers"], texts))


def _path(outcome: Outcome) -> str:
    title = f"Critical path, {outcome.words}"
    return section(title, f"{path_words(outcome.path)}.", path_picture(outcome.path))
