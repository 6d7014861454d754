"""`poseidon bench paper`: its tables and its JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from poseidon.bench.paper import geryon, parameter_hub
from poseidon.bench.paper.curves import CELLS, NODES, panels, predicted, stalls, traffic
from poseidon.bench.paper.figure import Figure
from poseidon.bench.paper.page import write_page
from poseidon.cli.output import JsonFlag, print_json, print_line, print_table
from poseidon.errors import InvalidArgument
from poseidon.report.svg import number_text

EPILOG = "Example: poseidon bench paper parameter-hub --json"

_POSEIDON = "poseidon"
_OTHERS: Mapping[str, Callable[[], Iterator[Figure]]] = {
    "parameter-hub": parameter_hub.figures,
    "geryon": geryon.figures,
}
_CURVES = "curves"
PaperArgument = Annotated[
    str, typer.Argument(metavar="[PAPER]", help=f"{_POSEIDON}, {', '.join(_OTHERS)} or {_CURVES}.")
]
HtmlOption = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write the figures of all papers as a page with charts.")
]


def paper(name: PaperArgument = _POSEIDON, html: HtmlOption = None, as_json: JsonFlag = False) -> None:
    """Predicts the speeds that a paper reports in prose and tables, at full scale, with this library's schedule.

    Nothing is run (docs/papers.md). "ps" is Poseidon's parameter server with wait-free backpropagation. "curves" are
    Poseidon's Figures 5 to 10, of whose points the paper's text gives few.
    """
    if html is not None:
        write_page(html)
        print_line(f"Wrote {html}")
    elif name == _CURVES:
        _print_curves(as_json)
    elif name == _POSEIDON:
        _print_speedups(as_json)
    elif name in _OTHERS:
        _print_figures(list(_OTHERS[name]()), as_json)
    else:
        raise InvalidArgument(f"there is no paper {name!r} here: give {_POSEIDON}, {', '.join(_OTHERS)} or {_CURVES}")


def _print_curves(as_json: bool) -> None:
    plots = list(panels())
    if as_json:
        others = {"stalls": [asdict(one) for one in stalls()], "traffic": [asdict(one) for one in traffic()]}
        print_json({"speedups": [plot.to_json() for plot in plots], **others})
        return
    print_table(
        ["figure", "model", "GbE", "system", *(f"{nodes} nodes" for nodes in NODES)],
        [
            [plot.figure, plot.model, f"{plot.gbit_per_s:g}", system, *(f"{value:.2f}" for value in values)]
            for plot in plots
            for system, values in plot.speedups.items()
        ],
    )


def _print_figures(figures: list[Figure], as_json: bool) -> None:
    if as_json:
        print_json([figure.to_json() for figure in figures])
        return
    print_table(
        ["from", "what", "unit", "paper", "ours", "difference"],
        [
            [
                figure.section,
                figure.what,
                figure.unit,
                f"{figure.paper:g}",
                number_text(figure.ours, 4),
                "given" if figure.given else f"{figure.difference:+.1%}",
            ]
            for figure in figures
        ],
    )


def _print_speedups(as_json: bool) -> None:
    cells = [predicted(cell) for cell in CELLS]
    if as_json:
        print_json([asdict(cell) for cell in cells])
        return
    print_table(
        ["from", "model", "nodes", "GbE", "scheme", "paper", "ours", "with overlap", "best choice"],
        [
            [
                cell.paper.section,
                cell.paper.model,
                cell.paper.nodes,
                f"{cell.paper.gbit_per_s:g}",
                cell.paper.scheme,
                "–" if cell.paper.speedup is None else f"{cell.paper.speedup:g}",
                f"{cell.speedup:.2f}",
                f"{cell.overlap_speedup:.2f}",
                f"{cell.best_speedup:.2f}",
            ]
            for cell in cells
        ],
    )
