"""The suite's results as a page, and as a table for the documentation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from poseidon.bench.suite.cells import BUSY, Cell, latest
from poseidon.bench.suite.grid import PEER, SCALE
from poseidon.bench.training.methods import METHODS
from poseidon.report.charts import bars_chart
from poseidon.report.layout import PAGE_WIDTH, document, figure, head, legend, section, table

_NONE = "none"
_HEADS = ("hosts", "GbE", "method", "step", "samples/s", "efficiency", "× DDP")
_METHOD = (
    "Layers are replayed: computation is slept, and gradients, exchange and update are real. Weights are divided by "
    f"{SCALE} in each dimension, and rates by {SCALE**2}. Time is stretched where two cores could not keep up, "
    "and shortened where a step would take long. Methods of a group take turns in the same network namespaces, with "
    f"plain queues and the system's TCP. Figures are medians. Where {BUSY:.0%} of the cores or more were busy (marked "
    "*), the processor is the limit and not the network."
)


@dataclass(frozen=True)
class Row:
    """A cell beside plain DDP. `step_s` is on the clock of the hardware that is stood for."""

    model: str
    hosts: int
    gbit_per_s: float
    method: str
    step_s: float
    samples_per_s: float
    efficiency: float
    over_ddp: float | None  # DDP's step over this one; None without DDP
    limited: bool

    def texts(self) -> list[str]:
        """Its cells in a table, after the model."""
        ratio = "" if self.over_ddp is None else f"{self.over_ddp:.2f}{'*' * self.limited}"
        step = f"{self.step_s * 1e3:,.0f} ms"
        return [
            *(str(self.hosts), f"{self.gbit_per_s:g}", self.method, step),
            *(f"{self.samples_per_s:,.1f}", f"{self.efficiency:.3f}", ratio),
        ]


def rows_of(cells: Iterable[Cell]) -> list[Row]:
    """By model, number of hosts and rate; the last measurement of each counts."""
    found = latest(cells)
    rows = []
    for (group, method), cell in found.items():
        if method == _NONE:
            continue
        peer = found.get((group, PEER))
        ratio = None if peer is None else peer.step_s / cell.step_s
        rows.append(
            Row(
                *(cell.model, cell.hosts, cell.gbit_per_s, method, cell.step_s / cell.stretch),
                *(cell.samples_per_s, cell.efficiency, ratio, cell.limited),
            )
        )
    return sorted(rows, key=lambda row: (row.model, row.hosts, row.gbit_per_s))


def summary(rows: Sequence[Row]) -> str:
    """How often Poseidon's defaults were faster than DDP, where the processor was not the limit."""
    counted = [row for row in rows if row.method == "poseidon" and row.over_ddp is not None and not row.limited]
    if not counted:
        return "Nothing was measured yet in which the network is the limit."
    ratios = sorted(row.over_ddp for row in counted if row.over_ddp is not None)
    behind = sum(ratio < 1 for ratio in ratios)
    middle = ratios[len(ratios) // 2]
    return (
        f"Poseidon's defaults against plain DDP in {len(ratios)} groups: {ratios[0]:.2f} to {ratios[-1]:.2f} times as "
        f"fast, in the middle {middle:.2f}; slower in {behind}."
    )


def write_page(cells: Iterable[Cell], path: Path) -> None:
    """Writes the page. Raises OSError if the file cannot be written."""
    rows = rows_of(cells)
    parts = [head("Benchmark suite", summary(rows)), section("Method", _METHOD, "")]
    parts += [_of_model(model, list(group)) for model, group in groupby(rows, key=lambda row: row.model)]
    path.write_text(document("Benchmark suite", parts), "utf-8")


def _of_model(model: str, rows: Sequence[Row]) -> str:
    names = [f"{row.hosts} × {row.gbit_per_s:g} GbE, {row.method}" for row in rows]
    bars = [(name, row.efficiency, f"{row.efficiency:.3f}") for name, row in zip(names, rows, strict=True)]
    peers = {name for name, row in zip(names, rows, strict=True) if METHODS[row.method].library != "poseidon"}
    picture = figure(lambda width: bars_chart(bars, width, f"Efficiency of {model}", 1.0, peers), PAGE_WIDTH)
    words = "The step without exchange over the step with it. A full bar is linear scaling."
    colours = legend([("scheme-1", "Poseidon"), ("backward", "torch's DDP, without and with its hooks")])
    return section(model, words, colours + picture + table(_HEADS, [row.texts() for row in rows]))


def markdown(cells: Iterable[Cell]) -> str:
    """A table with a line for each group, of DDP's step over that of each method."""
    return "\n".join(_markdown_lines(rows_of(cells)))


def _markdown_lines(rows: Sequence[Row]) -> Iterator[str]:
    names = list(dict.fromkeys(row.method for row in rows if row.method != PEER))
    yield f"| model | hosts | GbE | DDP's efficiency | {' | '.join(names)} |"
    yield "|---" * (4 + len(names)) + "|"
    for (model, hosts, rate), group in groupby(rows, key=lambda row: (row.model, row.hosts, row.gbit_per_s)):
        by_name = {row.method: row for row in group}
        peer = by_name.get(PEER)
        texts = [by_name[name].texts()[-1] if name in by_name else "" for name in names]
        efficiency = "" if peer is None else f"{peer.efficiency:.3f}"
        yield f"| {model} | {hosts} | {rate:g} | {efficiency} | {' | '.join(texts)} |"
