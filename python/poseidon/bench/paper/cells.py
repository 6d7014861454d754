"""What Poseidon's paper says of throughput in prose, and the same predicted with this library.

Curves of its figures have no numbers in the text, so only those that a sentence gives are here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from poseidon.models import model_table
from poseidon.planner import ClusterSpec, Exchange, Planner

GBIT = 1e9


@dataclass(frozen=True)
class PaperCell:
    """A speed-up over one node that a paper reports. `scheme`: auto is the paper's system, ps its WFBP or PS.

    `speedup` is None where the paper only says "near-linear".
    """

    section: str
    model: str
    nodes: int
    gbit_per_s: float
    scheme: str
    speedup: float | None


CELLS = (
    PaperCell("Poseidon §5.1, Figure 6", "Inception-V3", 32, 40, "auto", 31.5),
    PaperCell("Poseidon §5.1, Figure 9", "ResNet-152", 32, 40, "auto", 31.0),
    PaperCell("Poseidon §5.1, Figure 5", "VGG19-22K", 32, 40, "auto", 29.5),
    PaperCell("Poseidon §5.1, Figure 5", "VGG19-22K", 32, 40, "ps", 21.5),
    PaperCell("Poseidon §5.1, Figure 6", "VGG19", 32, 40, "auto", 30.0),
    PaperCell("Poseidon §5.2, Figure 8", "VGG19-22K", 16, 10, "auto", 15.5),
    PaperCell("Poseidon §5.2, Figure 8", "VGG19", 16, 10, "auto", None),
    PaperCell("Poseidon §5.2, Figure 8", "VGG19", 16, 10, "ps", 8.0),
)


@dataclass(frozen=True)
class PredictedCell:
    """A cell with this library's speed-up: with all waiting at the end of backward, and with a DistributedOptimizer.

    `best_speedup`: the second one with the fastest of all choices of schemes, each of which is simulated.
    """

    paper: PaperCell
    speedup: float
    overlap_speedup: float
    best_speedup: float


def predicted(cell: PaperCell) -> PredictedCell:
    """Predicts one cell, on colocated servers and Titan X."""
    table = model_table(cell.model)
    cluster = ClusterSpec(cell.nodes, cell.gbit_per_s * GBIT)
    waiting = Exchange(scheme=cell.scheme)
    overlapping = Planner(table, cluster, replace(waiting, overlap=True))
    return PredictedCell(
        cell,
        Planner(table, cluster, waiting).predict().speedup,
        overlapping.predict().speedup,
        overlapping.predict_best().speedup,
    )
