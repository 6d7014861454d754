"""What the suite has measured: one line of JSON for each method of each group, which are kept as they come."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from poseidon.bench.suite.grid import Group
from poseidon.bench.training.methods import Method
from poseidon.bench.training.results import TrainResult
from poseidon.bench.training.run import run_training
from poseidon.check.neighbours import ProcessorTime
from poseidon.errors import InvalidArgument

FILE = "cells.jsonl"
# Of the processor: with more, hosts wait for cores now and then. BERT-base on 8 hosts at 10 GbE had an efficiency of
# 0.80 at a share of 0.72, and of 0.91 at a lower one.
BUSY = 0.7
_MOST_SLOWER = 16.0


@dataclass(frozen=True)
class Cell:
    """One method of a group. `step_seconds` has every measured step, on the stretched clock, and `step_s` their median.

    `efficiency` is the same processes' step without exchange over this one. `cpu` is the share of the machine's cores
    that was busy while the whole group ran. Bytes are those of one host in a step, sent plus received: `port_bytes` of
    its port, `plain_bytes` and `coded_bytes` those of Poseidon's messages without coding and as they travelled. These
    two are None for other methods, and where nobody has counted them.
    """

    model: str
    gbit_per_s: float
    hosts: int
    method: str
    stretch: float
    scale: int
    step_seconds: list[float]
    step_s: float
    efficiency: float
    samples_per_s: float
    port_bytes: float
    cpu: float
    plain_bytes: float | None = None
    coded_bytes: float | None = None

    @property
    def coded_share(self) -> float | None:
        """What travels of each byte of Poseidon's messages."""
        return self.coded_bytes / self.plain_bytes if self.coded_bytes and self.plain_bytes else None

    @property
    def group(self) -> Group:
        """Where it was measured."""
        return Group(self.model, self.gbit_per_s, self.hosts)

    @property
    def limited(self) -> bool:
        """Whether the processor was the limit, and not the ports that the cell stands for."""
        return self.cpu >= BUSY


def measure(group: Group, methods: Sequence[Method]) -> list[Cell]:
    """Runs a group, and again with time stretched twice as much where the processor was the limit.

    Needs root and iproute2. Raises PoseidonError.
    """
    before = ProcessorTime.now()
    result = run_training(group.config(methods))
    cells = list(_cells(group, result, ProcessorTime.now().since(before).busy_share))
    if any(cell.limited for cell in cells) and group.slower < _MOST_SLOWER:
        return measure(replace(group, slower=2 * group.slower), methods)
    return cells


def _cells(group: Group, result: TrainResult, cpu: float) -> Iterator[Cell]:
    for entry in result.methods:
        yield Cell(
            group.model,
            group.gbit_per_s,
            group.hosts,
            entry.method,
            group.stretch,
            result.scale,
            entry.step_seconds,
            entry.iteration_seconds,
            entry.efficiency,
            entry.samples_per_second,
            entry.interface_bytes,
            cpu,
            entry.payload_bytes,
            entry.coded_bytes,
        )


def load(folder: Path) -> list[Cell]:
    """What was measured before. Raises InvalidArgument for a line that is none of the suite's."""
    path, found = folder / FILE, []
    if not path.exists():
        return []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            found.append(Cell(**json.loads(line)))
        except (ValueError, TypeError):
            raise InvalidArgument(f"{path}, line {number} is no cell of the suite: remove it") from None
    return found


def latest(cells: Iterable[Cell]) -> dict[tuple[Group, str], Cell]:
    """The cells by group and method. Of one that was measured again the last counts."""
    return {(cell.group, cell.method): cell for cell in cells}


def append(folder: Path, cells: Iterable[Cell]) -> None:
    """Adds to the file at once and as a whole: a run that is cut off goes on after these."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / FILE, "a", encoding="utf-8") as file:
        file.write("".join(json.dumps(asdict(cell)) + "\n" for cell in cells))
        file.flush()
        os.fsync(file.fileno())


def missing(group: Group, methods: Sequence[Method], known: Iterable[Cell]) -> bool:
    """Whether some method of the group was not measured yet."""
    there = {cell.method for cell in known if cell.group == group}
    return not {method.name for method in methods} <= there
