"""`make demo`: four workers train a network on Fashion-MNIST, and a report shows the traffic of each layer.

With root and iproute2 each worker is in its own network namespace with a 200 Mb/s port. Otherwise all use loopback.
It writes report.html and trace.json.

Afterwards plain DDP trains for some steps on the same ports, and the report has both times of a step.

    python examples/demo.py [--ddp] [--link 200mbit] [--workers 4] [--epochs 3]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

import datasets
import demo_worker
import poseidon
from poseidon import report
from poseidon.launch import launch
from poseidon.testbed import Testbed, TestbedError

WORKER = Path(__file__).with_name("demo_worker.py")
DDP = "plain DDP (Gloo)"
DDP_STEPS = 30
# One thread each: the workers share this machine. Gloo warns about hosts without a name service.
WORKER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


class View:
    """Shows the run as it goes: a bar per epoch on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.start: dict[str, Any] = {}
        self.epochs: list[report.Epoch] = []
        self.losses: list[float] = []
        self._task: TaskID | None = None
        self._bar = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            TextColumn("{task.percentage:3.0f} %"),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("accuracy {task.fields[accuracy]}"),
            TextColumn("{task.fields[rate]} images/s"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> View:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def line(self, rank: int, text: str) -> None:
        """Takes a line of a worker's output."""
        if not text.startswith(demo_worker.EVENT_MARK):
            self._bar.console.print(f"[{rank}] {text}", markup=False, soft_wrap=True)
            return
        fields = json.loads(text.removeprefix(demo_worker.EVENT_MARK))
        getattr(self, f"_on_{fields.pop('event')}")(**fields)

    def _on_start(self, **fields: Any) -> None:
        self.start = fields
        self.console.print(f"{fields['dataset']}, {fields['parameter_count']:,} parameters", soft_wrap=True)

    def _on_step(self, epoch: int, step: int, step_count: int, loss: float, images_per_s: float) -> None:
        if step == 1:
            self._task = self._bar.add_task("", total=step_count, epoch=epoch, loss="", accuracy="…", rate="")
        if self._task is not None:
            self._bar.update(self._task, completed=step, loss=f"{loss:.3f}", rate=f"{images_per_s:,.0f}")

    def _on_epoch(self, losses: list[float], **fields: Any) -> None:
        epoch = report.Epoch(loss=sum(losses) / len(losses), **fields)
        self.epochs.append(epoch)
        self.losses += losses
        loss, accuracy, rate = f"{epoch.loss:.3f}", f"{epoch.accuracy:.4f}", f"{epoch.images_per_s:,.0f}"
        if self._task is not None:
            self._bar.update(self._task, completed=len(losses), loss=loss, accuracy=accuracy, rate=rate)
        if not self.console.is_terminal:
            self.console.print(f"epoch {epoch.number}  loss {loss}  accuracy {accuracy}  {rate} images/s")


def layer_table(layers: list[report.LayerRow]) -> Table:
    """The per-layer table for a terminal."""
    table = Table(title="Layers, in the order in which backward finishes them", title_justify="left")
    table.add_column("layer")
    table.add_column("scheme")
    for name in ("shape", "factor count", "bytes sent", "of dense", "hidden behind compute"):
        table.add_column(name, justify="right")
    for row in layers:
        factors = str(row.factor_count) if row.factor_count else "–"
        sent, dense = report.bytes_text(row.bytes_sent), report.bytes_text(row.dense_bytes)
        hidden = report.percent_text(row.hidden)
        table.add_row(row.name, row.scheme, row.shape_text, factors, sent, dense, hidden)
    return table


@contextmanager
def hosts(count: int, link: str) -> Iterator[tuple[Testbed | None, str]]:
    """Shaped hosts where this machine lets us make them, else None; and how to say it."""
    testbed = Testbed(count, link)
    try:
        testbed.up()
    except TestbedError as error:
        yield None, f"loopback, at its own speed ({error})"
        return
    try:
        yield testbed, f"{link} ports, each worker in a network namespace of its own"
    finally:
        testbed.down()


def worker_command(args: argparse.Namespace, records: str | Path, *options: str) -> list[str]:
    """What starts a worker."""
    return [sys.executable, str(WORKER), "--records", str(records), "--dataset", args.dataset, *options]


def ddp_step_s(args: argparse.Namespace, testbed: Testbed | None, records: Path) -> float | None:
    """The time of a step of plain DDP, from a few steps; None if it does not run here."""
    records.mkdir()
    command = worker_command(args, records, "--ddp", "--epochs", "1", "--steps", str(DDP_STEPS))
    codes = launch(command, args.workers, testbed=testbed, env=WORKER_ENVIRONMENT, on_line=lambda rank, text: None)
    return None if any(codes) else report.slowest_step_s(report.load_ranks(records))


def train(args: argparse.Namespace, console: Console, records: Path) -> report.Report:
    """Runs the workers and returns what they recorded. Exits if one of them failed."""
    command = worker_command(args, records, "--epochs", str(args.epochs), *(["--ddp"] if args.ddp else []))
    others = {}
    with hosts(args.workers, args.link) as (testbed, link):
        console.print(f"{args.workers} workers on {link}", soft_wrap=True)
        with View(console) as view:
            codes = launch(command, args.workers, testbed=testbed, env=WORKER_ENVIRONMENT, on_line=view.line)
        if any(codes):
            sys.exit(1)
        if not args.ddp:
            console.print(f"{DDP_STEPS} steps with {DDP}, to compare", soft_wrap=True)
            if (step_s := ddp_step_s(args, testbed, records / "ddp")) is not None:
                others[DDP] = step_s
    method = DDP if args.ddp else "Poseidon"
    count = view.start["parameter_count"]
    return report.Report(
        title="Poseidon demo",
        subtitle=f"{view.start['dataset']}: a convolutional network with {count:,} parameters, trained by "
        f"{args.workers} workers with {method}.",
        environment=[
            ("Workers", f"{args.workers} processes on one machine with {os.cpu_count()} cores"),
            ("Link", link),
            ("Exchange", method),
            ("Poseidon", poseidon.__version__),
            ("PyTorch", torch.__version__),
            ("Python", platform.python_version()),
            ("System", f"{platform.system()} {platform.release()} {platform.machine()}"),
        ],
        epochs=view.epochs,
        losses=view.losses,
        ranks=report.load_ranks(records),
        other_step_s=others,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ddp", action="store_true", help="plain torch DistributedDataParallel over Gloo, to compare")
    parser.add_argument("--link", default="200mbit", help="rate of each worker's port, where there can be shaped ones")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--dataset", default="auto", choices=["auto", "fashion-mnist", "digits"])
    parser.add_argument("--output", default=".", help="folder for report.html and trace.json")
    args = parser.parse_args()
    console = Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=110)
    started = time.monotonic()
    if args.dataset != "digits":
        datasets.fetch_fashion_mnist()  # once, before the workers, which may have no way out of their namespaces

    with tempfile.TemporaryDirectory() as records:
        result = train(args, console, Path(records))
    page, trace = Path(args.output, "report.html"), Path(args.output, "trace.json")
    report.write_html(result, page)
    report.write_trace(result, trace)

    if result.layers:
        console.print(layer_table(result.layers))
    for name, value, against in report.headlines(result):
        console.print(f"{name}: [bold]{value}[/bold] ({against})", soft_wrap=True)
    console.print(f"The whole demo took {time.monotonic() - started:.0f} s.", soft_wrap=True)
    console.print(f"Report: open {page} in a browser (xdg-open {page})", soft_wrap=True)
    console.print(f"Trace:  open https://ui.perfetto.dev and drop {trace} on it", soft_wrap=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # by now the workers have ended and their network is gone
        sys.exit(130)
