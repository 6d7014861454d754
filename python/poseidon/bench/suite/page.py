"""The suite's results as a page, and as a table for the documentation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from poseidon.bench.suite.cells import BUSY, Cell, latest
from poseidon.bench.suite.grid import HOOK, PEER, SCALE
from poseidon.bench.training.methods import METHODS
from poseidon.report.charts import bars_chart
from poseidon.report.layout import PAGE_WIDTH, document, figure, head, legend, section, table

_NONE, _DEFAULTS = "none", "poseidon"
_EXACT = (_DEFAULTS, "overlap")  # which send the same
_HEADS = ("hosts", "GbE", "method", "step", "samples/s", "efficiency", "coding", "× DDP", "× its bf16 hook")
_METHOD = (
    "Layers are replayed: computation is slept, and gradients, exchange and update are real. Weights are divided by "
    f"{SCALE} in each dimension, and rates by {SCALE**2}. Time is stretched where two cores could not keep up, "
    "and shortened where a step would take long. Methods of a group take turns in the same network namespaces, with "
    "plain queues and the system's TCP. Figures are medians. Coding is what of their bytes "
    "Poseidon's messages take. A group is measured again with time stretched twice as much where "
    f"{BUSY:.0%} of the cores or more were busy. Where that did not suffice (marked *), the processor is the limit and "
    "not the network."
)


@dataclass(frozen=True)
class Row:
    """A cell beside DDP, plain and, if it sends bf16, with the hook that does so, too.

    `step_s` is on the clock of the hardware that is stood for. `coded_share`: see `Cell`.
    """

    model: str
    hosts: int
    gbit_per_s: float
    method: str
    step_s: float
    samples_per_s: float
    efficiency: float
    over_ddp: float | None  # DDP's step over this one; None without DDP
    over_hook: float | None
    coded_share: float | None
    limited: bool

    def texts(self) -> list[str]:
        """Its cells in a table, after the model."""
        return [
            *(str(self.hosts), f"{self.gbit_per_s:g}", self.method, f"{self.step_s * 1e3:,.0f} ms"),
            *(f"{self.samples_per_s:,.1f}", f"{self.efficiency:.3f}", self.coding_text),
            *(self._ratio_text(self.over_ddp), self._ratio_text(self.over_hook)),
        ]

    @property
    def coding_text(self) -> str:
        """What travels of each byte; empty where it was not counted."""
        return "" if self.coded_share is None else f"{self.coded_share:.2f}"

    @property
    def short_text(self) -> str:
        """Its ratios, that to the hook in brackets."""
        hook = self._ratio_text(self.over_hook)
        return self._ratio_text(self.over_ddp) + (f" ({hook})" if hook else "")

    def _ratio_text(self, ratio: float | None) -> str:
        return "" if ratio is None else f"{ratio:.2f}{'*' * self.limited}"


def rows_of(cells: Iterable[Cell]) -> list[Row]:
    """By model, number of hosts and rate; the last measurement of each counts."""
    found = latest(cells)
    rows = []
    for (group, method), cell in found.items():
        if method == _NONE:
            continue
        hook = found.get((group, HOOK)) if method.endswith("-bf16") and method != HOOK else None
        rows.append(
            Row(
                *(cell.model, cell.hosts, cell.gbit_per_s, method, cell.step_s / cell.stretch),
                *(cell.samples_per_s, cell.efficiency, _ratio(found.get((group, PEER)), cell), _ratio(hook, cell)),
                *(cell.coded_share, cell.limited),
            )
        )
    return sorted(rows, key=lambda row: (row.model, row.hosts, row.gbit_per_s))


def _ratio(peer: Cell | None, cell: Cell) -> float | None:
    return None if peer is None else peer.step_s / cell.step_s


def summary(rows: Sequence[Row]) -> str:
    """How often Poseidon's defaults were faster than DDP, where the processor was not the limit."""
    counted = [row for row in rows if row.method == _DEFAULTS and row.over_ddp is not None and not row.limited]
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
    """A table with a line for each group: what exact methods send of each byte, and DDP's step over that of each one.

    In brackets there is the step of DDP's bf16 hook over that of methods that send bf16.
    """
    return "\n".join(_markdown_lines(rows_of(cells)))


def _markdown_lines(rows: Sequence[Row]) -> Iterator[str]:
    names = list(dict.fromkeys(row.method for row in rows if row.method != PEER))
    yield f"| model | hosts | GbE | DDP's efficiency | coding | {' | '.join(names)} |"
    yield "|---" * (5 + len(names)) + "|"
    for (model, hosts, rate), group in groupby(rows, key=lambda row: (row.model, row.hosts, row.gbit_per_s)):
        by_name = {row.method: row for row in group}
        peer = by_name.get(PEER)
        texts = [by_name[name].short_text if name in by_name else "" for name in names]
        efficiency = "" if peer is None else f"{peer.efficiency:.3f}"
        coding = next((by_name[name].coding_text for name in _EXACT if name in by_name), "")
        yield f"| {model} | {hosts} | {rate:g} | {efficiency} | {coding} | {' | '.join(texts)} |"
