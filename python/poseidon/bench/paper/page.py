"""The papers' figures beside ours, as a page that needs no other file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from poseidon.bench.paper import geryon, parameter_hub
from poseidon.bench.paper.curves import NODES, Panel, panels, stalls, traffic
from poseidon.bench.paper.figure import Figure
from poseidon.report.charts import bars_chart
from poseidon.report.layout import HALF_WIDTH, PAGE_WIDTH, document, figure, head, legend, section, table
from poseidon.report.lines import Line, speedup_chart
from poseidon.report.svg import bytes_text, number_text, percent_text

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
        [_title(plot), system, *(f"{value:.2f}" for value in values), _said(plot.said.get(system, {}))]
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


def _said(points: Mapping[int, float]) -> str:
    return ", ".join(f"{value:g} on {nodes}" for nodes, value in points.items())


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
