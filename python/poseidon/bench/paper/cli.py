"""`poseidon bench paper`: its table and its JSON."""

from __future__ import annotations

from dataclasses import asdict

from poseidon.bench.paper.cells import CELLS, predicted
from poseidon.cli.output import JsonFlag, print_json, print_table

EPILOG = "Example: poseidon bench paper --json"


def paper(as_json: JsonFlag = False) -> None:
    """Predicts the speed-ups that Poseidon's paper reports in prose, at full scale, with this library's schedule.

    Nothing is run (docs/papers.md). "ps" is the paper's parameter server with wait-free backpropagation.
    """
    cells = [predicted(cell) for cell in CELLS]
    if as_json:
        print_json([asdict(cell) for cell in cells])
        return
    print_table(
        ["from", "model", "nodes", "GbE", "scheme", "paper", "ours", "with overlap", "free products"],
        [
            [
                cell.paper.section,
                cell.paper.model,
                cell.paper.nodes,
                f"{cell.paper.gbit_per_s:g}",
                cell.paper.scheme,
                f"{cell.paper.speedup:g}",
                f"{cell.speedup:.2f}",
                f"{cell.overlap_speedup:.2f}",
                f"{cell.without_products:.2f}",
            ]
            for cell in cells
        ],
    )
