"""Critical paths as pictures, and `poseidon what-if` as a page that needs no other file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from poseidon.planner.clock import BACKWARD, FORWARD, PRODUCT
from poseidon.planner.critical_path import Part, path_words
from poseidon.planner.what_if import Outcome, WhatIf
from poseidon.report.charts import bars_chart
from poseidon.report.layout import PAGE_WIDTH, document, figure, figures, head, section, table
from poseidon.report.path_chart import Link, path_chart
from poseidon.report.svg import number_text, percent_text, seconds_text

_STYLES = {BACKWARD: "backward", FORWARD: "forward", PRODUCT: "update"}


def path_picture(parts: Sequence[Part]) -> str:
    """A critical path, a row for each resource on it."""
    links = [
        Link(part.place, part.begin_s, part.end_s, _STYLES.get(part.what, "scheme-1"), f"{part.name}, {part.what}")
        for part in parts
    ]
    end_s = parts[-1].end_s
    return figure(lambda width: path_chart(links, end_s, width, "Critical path of a step"), PAGE_WIDTH)


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
