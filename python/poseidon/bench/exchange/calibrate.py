"""`poseidon bench calibrate`: what predictions need to know of a machine, measured, as a cluster file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from poseidon import _core
from poseidon.bench.exchange.methods import parse_methods, parse_placement, parse_workload
from poseidon.bench.exchange.results import ExchangeConfig
from poseidon.bench.exchange.run import run_exchange
from poseidon.cli.output import JsonFlag, check_writable, print_json, print_line, print_table, written
from poseidon.errors import InvalidArgument
from poseidon.planner import ClusterSpec

EPILOG = "Example: poseidon bench calibrate --out cluster.toml"

_LARGE, _SMALL = "tensors:1x64MB", "tensors:1x64B"
_STEPS, _ROUNDS = 8, 3
_HOPS = 2  # to a server and back
_BUILT_IN = ClusterSpec(2, 1e9)


@dataclass(frozen=True)
class Calibration:
    """`workers` of one machine: what each exchanges with the others by memory and over TCP, bytes a second in each
    direction; the seconds of a message; and the multiply-adds a second of its processor.
    """

    workers: int
    memory_bytes_per_s: float
    tcp_bytes_per_s: float
    latency_s: float
    products_per_s: float

    def settings(self) -> dict[str, float]:
        """Those of a cluster file (docs/planning.md)."""
        return {
            "latency_ms": _rounded(self.latency_s * 1e3),
            "host_memory": _rounded(self.memory_bytes_per_s / 1e9),
            "products": _rounded(self.products_per_s / 1e9),
        }

    def toml(self) -> str:
        """The settings as a file, in which hosts and link are still to be given."""
        lines = [
            "# Measured by `poseidon bench calibrate`. Give hosts, link and workers_per_host, here or as options.",
            f"# {self.workers} workers on {os.cpu_count()} cores; over TCP each moves "
            f"{self.tcp_bytes_per_s * 8 / 1e9:.1f} Gb/s in each direction, so faster ports would wait for the cores.",
            *(f"{name} = {value:g}" for name, value in self.settings().items() if name != "products"),
            f"# products = {self.settings()['products']:g}  # where the processor multiplies factors, not a GPU",
        ]
        return "\n".join(lines) + "\n"


def measured(workers: int) -> Calibration:
    """Takes about half a minute. Raises PoseidonError."""
    return Calibration(
        workers,
        _exchange(workers, _LARGE, "auto").goodput_bits_per_second / 8,
        _exchange(workers, _LARGE, "tcp").goodput_bits_per_second / 8,
        _exchange(2, _SMALL, "tcp").median_seconds / _HOPS,
        float(_core.multiply_adds_per_second()),
    )


def _exchange(workers: int, workload: str, transport: str) -> Any:
    config = ExchangeConfig(
        workload=parse_workload(workload, 1),
        worker_count=workers,
        link=None,
        placement=parse_placement("cs"),
        methods=parse_methods("poseidon", [f"transport={transport}"]),
        step_count=_STEPS,
        repeat_count=_ROUNDS,
    )
    return run_exchange(config).methods[0]


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def calibrate(
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a cluster file; it must not exist.")] = None,
    workers: Annotated[int, typer.Option(min=2, max=64, help="Workers of this machine.")] = 2,
    as_json: JsonFlag = False,
) -> None:
    """Measures what `poseidon plan` and `simulate` need to know of this machine, in half a minute, on loopback.

    They take the file with --cluster. Run it where you will train, while nothing else runs.
    """
    if out is not None and out.exists():
        raise InvalidArgument(f"{out} exists: name another file, or remove it")
    if out is not None:
        check_writable("--out", out)
    found = measured(workers)
    if out is not None:
        with written("--out", out):
            out.write_text(found.toml(), "utf-8")
    if as_json:
        print_json(found.settings())
        return
    known = {"latency_ms": _BUILT_IN.latency_s * 1e3, "host_memory": _BUILT_IN.memory_bytes_per_s / 1e9}
    print_table(
        ("setting", "here", "otherwise", "meaning"),
        [
            (name, f"{value:g}", f"{known[name]:g}" if name in known else "", _MEANINGS[name])
            for name, value in found.settings().items()
        ],
    )
    print_line(
        f"Over TCP each of {workers} workers moves {found.tcp_bytes_per_s * 8 / 1e9:.1f} Gb/s in each direction."
    )
    if out is not None:
        print_line(f"Use it with:  poseidon plan VGG19 --cluster {out} --hosts 4 --link 1gbit")


_MEANINGS = {
    "latency_ms": "milliseconds of a message beside its bytes",
    "host_memory": "GB/s that a worker exchanges with the others of its host",
    "products": "10⁹ multiply-adds a second of its processor, for products of factors",
}
