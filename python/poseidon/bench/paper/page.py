"""The papers' figures beside ours, as a page that needs no other file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from poseidon.bench.paper import geryon, parameter_hub
from poseidon.bench.paper.curves import NODES, Panel, panels, stalls, traffic
from poseidon.bench.paper.figure import Figure
from poseidon.report.charts import bars_chart
from poseidon.report.layout import HALF_WIDTH, PAGE_WIDTH, document, figure, head, legend, section, table
from poseidon.report.svg import Canvas, Scale, bytes_text, number_text, percent_text

_STYLES: Mapping[str, str] = {
    "Poseidon": "scheme-1",
    "WFBP": "scheme-2",
    "PS": "scheme-3",
    "TensorFlow": "scheme-other",
}
_WORDS: Mapping[str, str] = {
    "Poseidon": "Poseidon: each layer by servers or by factors, as its backward pass ends",
    "WFBP": "WFBP: by servers alone, as its backward pass ends",
    "PS": "PS: by servers, after the whole backward pass",
    "TensorFlow": "TensorFlow: by servers, each of which has whole tensors",
}
_ABOUT = (
    "What the papers report, and what this library's planner predicts for the same clusters. Nothing was run: ours has "
    "no costs of software in it. docs/papers.md gives the reasons for differences."
)


def write_page(path: Path) -> None:
    """Predicts all figures and writes them as HTML. Takes a minute. Raises OSError if the file cannot be written."""
    parts = [head("The papers, predicted", _ABOUT), *_poseidon(), *_figures("Parameter Hub", parameter_hub.figures())]
    path.write_text(document("The papers, predicted", [*parts, *_figures("Geryon", geryon.figures())]), "utf-8")


def _poseidon() -> Iterator[str]:
    for name, plots in groupby(panels(), key=lambda panel: panel.figure):
        yield _speedups(name, list(plots))
    rows = [(f"{one.model}, {one.system}", one.share, percent_text(one.share)) for one in stalls()]
    picture = figure(lambda width: bars_chart(rows, width, "Share of a step that accelerators wait", 1.0), PAGE_WIDTH)
    words = "Which part of a step an accelerator waits, on 8 nodes at 40 GbE. The paper gives no numbers."
    yield section("Poseidon, Figure 7: stalls", words, picture)
    loads = [
        (f"{one.system}, node {node + 1}", size, bytes_text(size))
        for one in traffic()
        for node, size in enumerate(one.node_bytes)
    ]
    picture = figure(lambda width: bars_chart(loads, width, "Bytes of each node in a step"), PAGE_WIDTH)
    words = (
        "What each of 8 nodes sends and receives in a step of VGG19, by the closed forms of Table 1. Adam's servers "
        "are chosen so that the busiest has the least. The paper gives no numbers."
    )
    yield section("Poseidon, Figure 10: traffic", words, picture)


def _speedups(name: str, plots: Sequence[Panel]) -> str:
    systems = list(plots[0].speedups)
    colours = legend(
        [
            *((_STYLES[system], _WORDS[system]) for system in systems),
            ("limit", "linear"),
            ("said", "the paper's text"),
        ]
    )
    pictures = "".join(f"<div><h3>{_title(plot)}</h3>{_picture(plot)}</div>" for plot in plots)
    words = "Samples per second over those of one node, by number of nodes."
    heads = ["", "system", *map(str, NODES), "paper"]
    texts = [
        [
            _title(plot),
            system,
            *(f"{value:.2f}" for value in values),
            ", ".join(f"{value:g} on {nodes}" for nodes, value in plot.said.get(system, {}).items()),
        ]
        for plot in plots
        for system, values in plot.speedups.items()
    ]
    title = f"Poseidon, {name}: speed-up by nodes"
    return section(title, words, f'<div class="pair">{pictures}</div>{colours}{table(heads, texts)}')


def _picture(plot: Panel) -> str:
    lines = [
        Line(system, _STYLES[system], list(zip(NODES, values, strict=True)))
        for system, values in reversed(list(plot.speedups.items()))
    ]
    said = [
        (nodes, value, f"the paper: {system}, {nodes} nodes: {value:g}")
        for system, points in plot.said.items()
        for nodes, value in points.items()
    ]
    return figure(lambda width: speedup_chart(lines, said, width, f"Speed-up of {_title(plot)}"), HALF_WIDTH)


def _title(plot: Panel) -> str:
    return f"{plot.model}, {plot.gbit_per_s:g} GbE"


def _figures(paper: str, found: Iterable[Figure]) -> Iterator[str]:
    """A table for each table or figure of a paper."""
    for name, group in groupby(found, key=lambda one: one.section):
        rows = list(group)
        texts = [
            [one.what, f"{one.paper:g} {one.unit}", f"{number_text(one.ours, 4)} {one.unit}", _difference(one)]
            for one in rows
        ]
        yield section(f"{paper}, {name}", "", table(["", "paper", "ours", "difference"], texts))


def _difference(one: Figure) -> str:
    return "given" if one.given else f"{one.difference:+.1%}"


HEIGHT, TOP, BOTTOM, LEFT, RIGHT = 250.0, 12, 40, 36, 12


@dataclass(frozen=True)
class Line:
    """`points`: nodes and speed-up. `style`: a class of the style sheet that colours lines."""

    name: str
    style: str
    points: Sequence[tuple[float, float]]


def speedup_chart(lines: Sequence[Line], said: Sequence[tuple[float, float, str]], width: float, label: str) -> Canvas:
    """Speed-ups by number of nodes, a dashed line for linear scaling, and what somebody said as dots with a text."""
    most = max(nodes for line in lines for nodes, _ in line.points)
    least = min(1.0, *(value for line in lines for _, value in line.points))
    canvas = Canvas(width, HEIGHT, label)
    across = Scale(0, math.log2(most), LEFT, width - RIGHT)
    up = Scale(math.log2(least), math.log2(most), HEIGHT - BOTTOM, TOP)
    for power in range(math.ceil(math.log2(least)), math.floor(math.log2(most)) + 1):
        canvas.line(LEFT, up(power), width - RIGHT, up(power), "grid")
        canvas.text(LEFT - 8, up(power) + 4, f"{2**power:g}", "tick", "end")
    for power in range(math.floor(math.log2(most)) + 1):
        canvas.text(across(power), HEIGHT - BOTTOM + 18, f"{2**power}", "tick", "middle")
    canvas.text((LEFT + width - RIGHT) / 2, HEIGHT - 4, "nodes", "tick", "middle")
    canvas.line(across(0), up(0), across(math.log2(most)), up(math.log2(most)), "limit")
    for line in lines:
        canvas.polyline([(across(math.log2(x)), up(math.log2(y))) for x, y in line.points], f"line {line.style}")
        for x, y in line.points:
            canvas.dot(across(math.log2(x)), up(math.log2(y)), line.style, f"{line.name}, {x:g} nodes: {y:.2f}")
    for x, y, text in said:
        canvas.dot(across(math.log2(x)), up(math.log2(y)), "said", text)
    return canvas
