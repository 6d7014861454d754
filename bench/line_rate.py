#!/usr/bin/env python3
"""The line-rate bars, measured and judged: `python bench/line_rate.py [--only TEXT] [--repeats N]`.

Every line is a run of `poseidon bench exchange` (needs root for the shaped ports; a quiet machine). Ratios are
within one run: goodput against plain TCP copies on the same ports at the same time, step time against Gloo's
all-reduce, processor time per exchanged gigabyte against Gloo's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from poseidon.bench.exchange.methods import parse_methods, parse_placement, parse_workload
from poseidon.bench.exchange.results import ExchangeConfig, ExchangeMethodResult, ExchangeResult
from poseidon.bench.exchange.run import run_exchange

Metric = Callable[[ExchangeResult, ExchangeMethodResult], float]
MIB = 2**20


@dataclass(frozen=True)
class Bar:
    """What has to be reached: `metric` of Poseidon's method, at least or at most `bound`."""

    name: str
    metric: Metric
    bound: float
    at_least: bool = True

    def met(self, value: float) -> bool:
        """Whether `value` is on the right side."""
        return value >= self.bound if self.at_least else value <= self.bound


def by_name(result: ExchangeResult, name: str) -> ExchangeMethodResult:
    """The result of one method."""
    return next(method for method in result.methods if method.method == name)


def copy_ratio(result: ExchangeResult, mine: ExchangeMethodResult) -> float:
    """Goodput over that of the plain copies."""
    return mine.copy_ratio or 0.0


def gloo_ratio(result: ExchangeResult, mine: ExchangeMethodResult) -> float:
    """Gloo's step time over this one's."""
    return mine.gloo_ratio or 0.0


def cpu_ratio(result: ExchangeResult, mine: ExchangeMethodResult) -> float:
    """Processor time per gigabyte over Gloo's."""
    return mine.cpu_seconds_per_gb / by_name(result, "gloo").cpu_seconds_per_gb


def memory_over_allowance(result: ExchangeResult, mine: ExchangeMethodResult) -> float:
    """Peak memory above the framework's own and the shard, over the largest layer plus 64 MiB."""
    return mine.memory_peak_bytes / (result.largest_tensor_bytes + 64 * MIB)


LINE_RATE = Bar("goodput / plain copy", copy_ratio, 0.97)
CPU = Bar("CPU s/GB / Gloo", cpu_ratio, 0.75, at_least=False)
MEMORY = Bar("memory / (largest layer + 64 MiB)", memory_over_allowance, 1.0, at_least=False)


@dataclass(frozen=True)
class Case:
    """One run and what is asked of it."""

    model: str
    hosts: int
    link: str | None
    bars: tuple[Bar, ...]
    scale: int = 4
    transport: str = "tcp"
    steps: int = 5
    methods: str = "poseidon,gloo,tcp-copy"

    @property
    def title(self) -> str:
        """Names the run in the table."""
        return f"{self.model}/{self.scale} × {self.hosts}, {self.link or 'loopback'}, {self.transport}"


# Where ResNet-50 is also run with its 102 MB unscaled: a step takes seconds.
_AT_FULL_SIZE = {("625mbit", hosts) for hosts in (2, 4, 8, 16)} | {("156mbit", 8)}


def cases() -> Iterator[Case]:
    """All runs of the bars' table."""
    for link in ("625mbit", "156mbit"):
        for hosts in (2, 4, 8, 16):
            for model, scale in (("VGG19", 4), ("ResNet-50", 4), ("ResNet-50", 1)):
                if scale == 1 and (link, hosts) not in _AT_FULL_SIZE:
                    continue
                steps = 5 if model == "ResNet-50" and scale == 4 else 3
                yield Case(model, hosts, link, (LINE_RATE, MEMORY), scale, steps=steps, methods="poseidon,tcp-copy")
    two_copies = Bar("goodput / two plain copies", copy_ratio, 0.85)
    tcp_speed = Bar("speed / Gloo", gloo_ratio, 1.2)
    yield Case("tensors:1x256MB", 2, None, (tcp_speed, two_copies, CPU), 1, steps=9)
    yield Case("tensors:1x256MB", 2, None, (Bar("speed / Gloo", gloo_ratio, 4.0),), 1, "shm", steps=9)
    yield Case("VGG19", 2, None, (MEMORY,), 1)


def run(case: Case, repeats: int) -> Iterator[tuple[str, float, Bar]]:
    """Measures one case and judges it."""
    config = ExchangeConfig(
        workload=parse_workload(case.model, case.scale),
        worker_count=case.hosts,
        link=case.link,
        placement=parse_placement("cs"),
        methods=parse_methods(case.methods, [f"transport={case.transport}"]),
        step_count=case.steps,
        repeat_count=repeats,
    )
    result = run_exchange(config)
    mine = by_name(result, "poseidon")
    for bar in case.bars:
        yield case.title, bar.metric(result, mine), bar


def small_against_large(repeats: int) -> tuple[str, float, Bar]:
    """10,000 tensors of 1 KB over one of 10 MB."""
    times = []
    for model in ("tensors:10000x1KB", "tensors:1x10MB"):
        config = ExchangeConfig(
            workload=parse_workload(model, 1),
            worker_count=2,
            link=None,
            placement=parse_placement("cs"),
            methods=parse_methods("poseidon"),
            step_count=30,
            repeat_count=repeats,
        )
        times.append(by_name(run_exchange(config), "poseidon").median_seconds)
    return (
        "10000 × 1 KB against 1 × 10 MB, tcp",
        times[0] / times[1],
        Bar("step / step", gloo_ratio, 1.5, at_least=False),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="runs whose title contains this")
    parser.add_argument("--repeats", type=int, default=3, help="rounds per method")
    arguments = parser.parse_args()
    print(f"{'run':44} {'what':34} {'measured':>8}   {'bar':>7}")
    for case in cases():
        if arguments.only in case.title:
            for line in run(case, arguments.repeats):
                report(*line)
    if arguments.only in "10000 × 1 KB":
        report(*small_against_large(arguments.repeats))


def report(title: str, value: float, bar: Bar) -> None:
    """One line of the table."""
    sign = "≥" if bar.at_least else "≤"
    print(
        f"{title:44} {bar.name:34} {value:8.3f}   {sign} {bar.bound:<5} {'met' if bar.met(value) else 'MISSED'}",
        flush=True,
    )


if __name__ == "__main__":
    main()
