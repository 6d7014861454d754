"""`poseidon bench paper`: its tables and its JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Annotated

import typer

from poseidon.bench.paper import geryon, parameter_hub
from poseidon.bench.paper.cells import CELLS, predicted
from poseidon.bench.paper.figure import Figure
from poseidon.cli.output import JsonFlag, print_json, print_table
from poseidon.errors import InvalidArgument

EPILOG = "Example: poseidon bench paper parameter-hub --json"

_POSEIDON = "poseidon"
_OTHERS: Mapping[str, Callable[[], Iterator[Figure]]] = {
    "parameter-hub": parameter_hub.figures,
    "geryon": geryon.figures,
}
PaperArgument = Annotated[str, typer.Argument(metavar="[PAPER]", help=f"{_POSEIDON}, {' or '.join(_OTHERS)}.")]


def paper(name: PaperArgument = _POSEIDON, as_json: JsonFlag = False) -> None:
    """Predicts the speeds that a paper reports in prose and tables, at full scale, with this library's schedule.

    Nothing is run (docs/papers.md). "ps" is Poseidon's parameter server with wait-free backpropagation.
    """
    if name == _POSEIDON:
        _print_speedups(as_json)
    elif name in _OTHERS:
        _print_figures(list(_OTHERS[name]()), as_json)
    else:
        raise InvalidArgument(f"there is no paper {name!r} here: give {_POSEIDON}, {' or '.join(_OTHERS)}")


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
                f"{figure.ours:.4g}",
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
