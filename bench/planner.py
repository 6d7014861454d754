"""Predicted against measured training steps: how far off is the planner?

Draws a sample of 100 cells of model, method, rate, hosts and switches. Of these it replays --cells, from --first on, on
a testbed, and predicts the same steps. Prints both, and the errors of time and of bytes. With --record it appends what
was measured to a file, and --recorded predicts the cells of such a file again. With --documented it takes the steps
that docs/benchmarks.md has in its tables of 8 and 16 hosts. With --suite it takes the cells of `poseidon bench suite`,
those of torch's DDP and its hooks of 16 bits included.

    python bench/planner.py --cells 3 --first 6 --record cells.jsonl      # root and iproute2; about 1 minute a cell
    python bench/planner.py --recorded cells.jsonl
    python bench/planner.py --documented
    python bench/planner.py --suite bench/results/suite
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from poseidon import _core
from poseidon.bench.suite.cells import latest, load
from poseidon.bench.training.methods import METHODS, Method, exchange_of
from poseidon.bench.training.results import TrainConfig, TrainResult
from poseidon.bench.training.run import run_training
from poseidon.planner import ClusterSpec, Planner, Prediction
from poseidon.planner.ddp import ddp_step_s
from poseidon.rates import parse_rate
from poseidon.testbed.shaping import ETHERNET_HEADER_BYTES

MODELS = ("VGG19", "AlexNet", "GoogLeNet", "ResNet-50", "BERT-base", "ViT-B/16", "GPT-2")
CHOSEN = ("poseidon", "wfbp-ps", "overlap", "overlap-ps", "poseidon-bf16", "overlap-bf16", "poseidon-int8")
LINKS = ("625mbit", "156.25mbit", "31.25mbit")
HOSTS = (2, 4, 8, 16)
SCALE = 4
SAMPLE = 100  # cells that a seed draws
MEDIAN_BAR, WORST_BAR, BYTES_BAR = 0.03, 0.08, 0.01
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
_Found = TypeVar("_Found")
# A row of a table of efficiencies. Its last column, the bytes beyond the plan, tells it from rows of other tables.
_ROW = re.compile(
    r"^\| ([\w-]+) \| (\d+) \| ([\d.]+) \| [\d.]+ \| ([\d.]+) \| ([\d.]+) \|(?: [\d.]+ \|){3} [^|]+ \| [^|]+ \|$", re.M
)
_COMPUTE_S = {"VGG19": 3.6, "VGG19-22K": 3.6}  # of the documented tables; others by the papers' times


@dataclass(frozen=True)
class Cell:
    """A predicted and a measured step. Bytes are sent plus received by one host; None: not measured."""

    method: str
    words: str
    predicted_s: float
    measured_s: float
    predicted_bytes: float
    measured_bytes: float | None

    @property
    def error(self) -> float:
        """By which fraction the prediction is too long."""
        return self.predicted_s / self.measured_s - 1

    @property
    def bytes_error(self) -> float | None:
        """By which fraction the predicted bytes are too many."""
        return None if self.measured_bytes is None else self.predicted_bytes / self.measured_bytes - 1


def cluster_of(config: TrainConfig, charged: bool = True) -> ClusterSpec:
    """The hosts of a replay, whose processors share this machine.

    `charged`: products of factors take the accelerator's time. In replays of version 1.0.0 and before they took a
    processor's.
    """
    assert config.link is not None
    return ClusterSpec(
        config.host_count,
        parse_rate(config.link),
        strict_priority=config.testbed.get("honour_dscp", False),
        mtu=config.mtu,
        frame_bytes=ETHERNET_HEADER_BYTES,
        # All hosts multiply at the same time, on the cores of this machine.
        products_per_s=None
        if charged
        else _core.multiply_adds_per_second() * min(1.0, (os.cpu_count() or 1) / config.host_count),
    )


def predict(
    config: TrainConfig,
    method: Method,
    without_exchange_s: float,
    charged: bool = True,
    coded_share: float | None = None,
) -> Prediction:
    """The step that `poseidon bench train` replays. What it takes without exchange beyond compute is its update.

    `coded_share`: what travelled of each byte; None: it was measured without coding.
    """
    table = replace(config.table, iteration_seconds=config.compute_seconds)
    exchange = exchange_of(method, config.scale, "coarse")
    if coded_share is not None:
        exchange = replace(exchange, coding="on", coded_share=coded_share)
    planner = Planner(table, cluster_of(config, charged), exchange)
    update_s = max(0.0, without_exchange_s - config.compute_seconds)
    return planner.predict_by_message(update_s) if planner.has_messages else planner.predict(update_s=update_s)


@dataclass(frozen=True)
class Measured:
    """A replayed cell: `step_s`, and `none_s` without exchange. `payload_bytes`: those of a host, sent plus received.

    They are counted as they travelled, which is `coded_share` of what they are. None: without coding.

    `honour`: the switches serve marked packets first.
    """

    model: str
    method: str
    link: str
    hosts: int
    honour: bool
    none_s: float
    step_s: float
    payload_bytes: float | None
    coded_share: float | None = None


def drawn(seed: int) -> Iterator[TrainConfig]:
    """A sample of cells at random, none twice."""
    generator = random.Random(seed)
    cells = [
        (model, method, link, hosts, honour)
        for model in MODELS
        for method in CHOSEN
        for link in LINKS
        for hosts in HOSTS
        for honour in (False, True)
    ]
    for model, method, link, hosts, honour in generator.sample(cells, SAMPLE):
        yield config_of(model, hosts, link, (METHODS["none"], METHODS[method]), honour)


def config_of(model: str, hosts: int, link: str, methods: tuple[Method, ...], honour: bool) -> TrainConfig:
    """One step in each of two rounds at scale 4, with the options of the documented tables."""
    network = {"priorities": 2, "honour_dscp": honour}
    config = TrainConfig(model, hosts, link, SCALE, 1.0, methods, step_count=1, repeat_count=2, testbed=network)
    table = config.full_table
    seconds = _COMPUTE_S.get(model, table.iteration_seconds * SCALE)
    options = {"priority_classes": 2, "priority_threshold": "coarse"}
    return replace(config, compute_seconds=seconds, options=options)


def measure(config: TrainConfig) -> Measured:
    """Replays a cell."""
    result: TrainResult = run_training(config)
    none, entry = result.methods
    return Measured(
        config.model,
        entry.method,
        str(config.link),
        config.host_count,
        config.testbed["honour_dscp"],
        none.iteration_seconds,
        entry.iteration_seconds,
        entry.coded_bytes,
        entry.coded_share,
    )


def predicted(cell: Measured) -> Cell:
    """Predicts a replayed cell."""
    method = METHODS[cell.method]
    config = config_of(cell.model, cell.hosts, cell.link, (METHODS["none"], method), cell.honour)
    prediction = predict(config, method, cell.none_s, coded_share=cell.coded_share)
    switches = "priority" if cell.honour else "FIFO"
    words = f"{cell.model}, {cell.method}, {cell.hosts} hosts, {cell.link}, {switches}"
    return Cell(cell.method, words, prediction.step_s, cell.step_s, prediction.port_bytes, cell.payload_bytes)


def append(file: Path, found: Any) -> None:
    """Writes a dataclass as one more line of a file."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(asdict(found)) + "\n")


def recorded(file: Path, kind: type[_Found]) -> list[_Found]:
    """What `append` has written to a file."""
    return [kind(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def replayed(seed: int, first: int, count: int, record: Path | None) -> Iterator[Measured]:
    """Replays cells of the sample, and appends them to the file `record`."""
    for config in islice(drawn(seed), first, first + count):
        cell = measure(config)
        if record is not None:
            append(record, cell)
        yield cell


def documented() -> Iterator[Cell]:
    """The rows of the page that have a step without exchange and Poseidon's efficiency."""
    for model, hosts, rate, none_s, efficiency in _ROW.findall(PAGE.read_text(encoding="utf-8")):
        method = METHODS["poseidon"]
        config = config_of(model, int(hosts), f"{rate}mbit", (method,), honour=False)
        prediction = predict(config, method, float(none_s), charged=True)
        words = f"{model}, {hosts} hosts, {rate} Mb/s"
        measured_s = float(none_s) / float(efficiency)
        yield Cell(method.name, words, prediction.step_s, measured_s, prediction.port_bytes, None)


def of_suite(folder: Path) -> Iterator[Cell]:
    """The cells of `poseidon bench suite` whose methods a prediction knows."""
    found = latest(load(folder))
    for (group, name), cell in found.items():
        method = METHODS[name]
        if method.library == "none" or method.powersgd_rank is not None or method.on_servers:
            continue
        config, none_s = group.config([method]), found[group, "none"].step_s
        if method.library == "poseidon":
            # Version 1.0.0 neither charged products nor counted what is coded.
            step_s = predict(config, method, none_s, cell.coded_share is not None, cell.coded_share).step_s
        else:
            table = replace(config.table, iteration_seconds=none_s)
            step_s = ddp_step_s(table, cluster_of(config), 4 if method.wire == "fp32" else 2, config.scale)
        yield Cell(name, f"{group}, {name}", step_s, cell.step_s, 0.0, None)


def judge_methods(cells: list[Cell]) -> Iterator[str]:
    """A line about the errors of each method."""
    for name in dict.fromkeys(cell.method for cell in cells):
        errors = sorted(abs(cell.error) for cell in cells if cell.method == name)
        yield f"{name}: {len(errors)} cells, median error {median(errors):.2%}, worst {errors[-1]:.2%}"


def judge(cells: list[Cell]) -> dict[str, Any]:
    """The errors over Poseidon's cells, and whether they are within the bars."""
    cells = [cell for cell in cells if METHODS[cell.method].library == "poseidon"]
    errors = [abs(cell.error) for cell in cells]
    byte_errors = [abs(cell.bytes_error) for cell in cells if cell.bytes_error is not None]
    return {
        "median_error": median(errors),
        "worst_error": max(errors),
        "worst_bytes_error": max(byte_errors, default=None),
        "ok": median(errors) <= MEDIAN_BAR and max(errors) <= WORST_BAR and max(byte_errors, default=0.0) <= BYTES_BAR,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=5, help="how many cells of the sample to replay")
    parser.add_argument("--first", type=int, default=0, help="the first of them, from 0")
    parser.add_argument("--seed", type=int, default=1, help="which sample is drawn")
    parser.add_argument("--record", type=Path, help="append what was measured to this file")
    parser.add_argument("--recorded", type=Path, help="predict the cells of this file instead")
    parser.add_argument("--documented", action="store_true", help="compare with docs/benchmarks.md instead")
    parser.add_argument("--suite", type=Path, help="predict the cells of this suite's results instead")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.documented:
        found = documented()
    elif args.suite:
        found = of_suite(args.suite)
    elif args.recorded:
        found = map(predicted, recorded(args.recorded, Measured))
    else:
        found = map(predicted, replayed(args.seed, args.first, args.cells, args.record))
    cells = []
    for cell in found:
        cells.append(cell)
        if not args.json:
            counted = "" if cell.bytes_error is None else f", bytes {cell.bytes_error:+.2%}"
            times = f"{cell.predicted_s:.3f} s predicted, {cell.measured_s:.3f} s measured"
            print(f"{cell.words}: {times} ({cell.error:+.1%}){counted}", flush=True)
    result = judge(cells)
    if args.json:
        print(json.dumps({"cells": [asdict(cell) for cell in cells], **result}, indent=2))
        return
    for line in judge_methods(cells):
        print(line)
    bars = "bars met" if result["ok"] else "bars MISSED"
    print(f"Poseidon: median error {result['median_error']:.2%}, worst {result['worst_error']:.2%}; {bars}")


if __name__ == "__main__":
    main()
