"""What Poseidon's paper says of throughput, and the same predicted with this library.

`CELLS` are the speed-ups of which its prose gives numbers. The curves of Figures 5 to 10 are
speed-ups by nodes, stalls, and the traffic of each node. The text gives no numbers for most points
of them. `_SAID` has those that a sentence gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any

from poseidon.bench.training.traffic import traffic as layer_traffic
from poseidon.models import model_table
from poseidon.planner import ClusterSpec, Exchange, Planner
from poseidon.schemes import takes_factors

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


NODES = (1, 2, 4, 8, 16, 32)
_BUSY_NODES = 8  # of Figures 7 and 10
_FLOAT_BYTES = 4

SYSTEMS: Mapping[str, Exchange] = MappingProxyType(
    {
        "Poseidon": Exchange(),
        "WFBP": Exchange(scheme="ps"),
        "PS": Exchange(scheme="ps", schedule="sequential"),
        "TensorFlow": Exchange(scheme="ps", partition="coarse"),
    }
)
"""By the paper's names: hybrid and wait-free; wait-free with servers alone; servers after the backward pass; a whole
tensor on one server. All wait at the end of the backward pass."""


@dataclass(frozen=True)
class Panel:
    """One plot of a figure: the speed-up over one node, by system and number of nodes (`NODES`)."""

    figure: str
    model: str
    gbit_per_s: float
    speedups: Mapping[str, Sequence[float]]
    said: Mapping[str, Mapping[int, float]]  # what a sentence of the paper gives, by system and nodes

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {**asdict(self), "nodes": NODES}


@dataclass(frozen=True)
class Stall:
    """Figure 7: which part of a step an accelerator waits, on 8 nodes at 40 GbE."""

    model: str
    system: str
    share: float


@dataclass(frozen=True)
class Traffic:
    """Figure 10: bytes that each of 8 nodes sends and receives in a step of VGG19, the busiest first."""

    system: str
    node_bytes: Sequence[float]


_CAFFE, _TENSORFLOW = ("Poseidon", "WFBP", "PS"), ("Poseidon", "WFBP", "TensorFlow")
_FIGURES: Sequence[tuple[str, Sequence[str], Sequence[tuple[str, Sequence[float]]]]] = (
    ("Figure 5", _CAFFE, (("GoogLeNet", (40,)), ("VGG19", (40,)), ("VGG19-22K", (40,)))),
    ("Figure 6", _TENSORFLOW, (("Inception-V3", (40,)), ("VGG19", (40,)), ("VGG19-22K", (40,)))),
    (
        "Figure 8",
        ("Poseidon", "WFBP"),
        (("GoogLeNet", (2, 5, 10)), ("VGG19", (10, 20, 30)), ("VGG19-22K", (10, 20, 30))),
    ),
    ("Figure 9", ("Poseidon", "TensorFlow"), (("ResNet-152", (40,)),)),
)
_SAID: Mapping[tuple[str, str, float], Mapping[str, Mapping[int, float]]] = {
    ("Figure 5", "VGG19-22K", 40): {"Poseidon": {32: 29.5}, "WFBP": {32: 21.5}},
    ("Figure 6", "Inception-V3", 40): {"Poseidon": {32: 31.5}, "TensorFlow": {32: 10}},
    ("Figure 6", "VGG19", 40): {"Poseidon": {32: 30}, "WFBP": {32: 22}},
    ("Figure 8", "VGG19", 10): {"WFBP": {16: 8}},
    ("Figure 8", "VGG19-22K", 10): {"Poseidon": {16: 15.5}},
    ("Figure 9", "ResNet-152", 40): {"Poseidon": {32: 31}},
}


def panels() -> Iterator[Panel]:
    """All plots of speed-ups, in the order of the paper."""
    for figure, systems, models in _FIGURES:
        for model, rates in models:
            for rate in rates:
                curves = {system: [speedup(model, nodes, rate, system) for nodes in NODES] for system in systems}
                yield Panel(figure, model, rate, curves, _SAID.get((figure, model, rate), {}))


@cache
def speedup(model: str, nodes: int, gbit_per_s: float, system: str) -> float:
    """Of so many nodes over one, which has the paper's Titan X."""
    return Planner(model_table(model), ClusterSpec(nodes, gbit_per_s * GBIT), SYSTEMS[system]).predict().speedup


def stalls() -> Iterator[Stall]:
    """Figure 7."""
    for model in ("Inception-V3", "VGG19", "VGG19-22K"):
        for system in reversed(_TENSORFLOW):
            yield Stall(model, system, 1 - speedup(model, _BUSY_NODES, 40, system) / _BUSY_NODES)


def traffic() -> Iterator[Traffic]:
    """Figure 10, by the closed forms of Table 1. Adam's servers are chosen so that the busiest has least to do."""
    for system, scheme in (("WFBP", "ps"), ("Poseidon", "auto")):
        shared = sum(one.bytes for one in layer_traffic(model_table("VGG19"), _BUSY_NODES, _replayed(scheme)))
        yield Traffic(system, [shared] * _BUSY_NODES)
    yield Traffic("Adam", _adam_bytes())


def _replayed(scheme: str) -> Exchange:
    return Exchange(scheme, sizes={"small_bytes": 0}, replayed=True)


def _adam_bytes() -> list[float]:
    """A layer's server takes the factors of the others and gives each the matrix; its host is a worker, too."""
    table, peers = model_table("VGG19"), _BUSY_NODES - 1
    node_bytes, layers = [0.0] * _BUSY_NODES, []
    dense = layer_traffic(table, _BUSY_NODES, _replayed("ps"))
    for layer, shared, one in zip(
        table.layers, dense, layer_traffic(table, _BUSY_NODES, _replayed("project_adam")), strict=True
    ):
        if not takes_factors(one.scheme):
            node_bytes = [moved + shared.bytes for moved in node_bytes]
            continue
        count, (rows, cols) = table.factor_count(layer), layer.weight_shape
        layers.append(_FLOAT_BYTES * (rows * cols + count * (rows + cols)))
        biases = 2 * peers / _BUSY_NODES * 2 * _FLOAT_BYTES * rows  # sharded, sent and received
        node_bytes = [moved + biases for moved in node_bytes]
    for size in sorted(layers, reverse=True):
        server = min(range(_BUSY_NODES), key=node_bytes.__getitem__)
        node_bytes = [moved + size * (peers if node == server else 1) for node, moved in enumerate(node_bytes)]
    return sorted(node_bytes, reverse=True)
