#!/usr/bin/env python3
"""The bars of priorities and overlap, measured and judged: `python bench/priority_bars.py [--only TEXT]`.

Most lines are runs of `poseidon bench train`. They need root for the shaped ports, and a quiet machine. Efficiency is
the step without exchange over the step with it, both from one run. No schedule of the method's bytes can beat its bound
(docs/benchmarks.md), at the rate of plain TCP copies on the same ports in the same run. If the bound is below the bar,
the bar is 97 % of the bound.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace

from poseidon.bench.network_options import priority_options
from poseidon.bench.priority.cost import CHUNK_COUNTS, VGG19_TENSOR_COUNT, measure_costs
from poseidon.bench.priority.tables import PAPER_MODELS, GridConfig
from poseidon.bench.priority.urgent import UrgentConfig, run_urgent
from poseidon.bench.progress import round_progress
from poseidon.bench.training.methods import METHODS, parse_methods
from poseidon.bench.training.results import TrainConfig, TrainResult
from poseidon.bench.training.run import run_training
from poseidon.cli.network import Switches, network_arguments
from poseidon.models import model_table
from poseidon.rates import format_rate

HOSTS, SCALE, STRETCH, CLASSES = 8, 4, 4, 2
OF_THE_BOUND = 0.97
NOISE = 0.005  # of a ratio of two steps' medians in one run
HEADER_SHARE = 1448 / 1514  # payload of what a full packet takes on a port


@dataclass(frozen=True)
class Judged:
    """One line of the table. bound: what arithmetic allows at most; None where it decides nothing."""

    title: str
    what: str
    measured: float
    bar: float
    at_least: bool = True
    bound: float | None = None
    noise: float = 0.0

    @property
    def asked(self) -> float:
        """The bar, or what is asked for where the bar is out of reach."""
        return self.bar if self.bound is None or self.bound >= self.bar else OF_THE_BOUND * self.bound

    @property
    def met(self) -> bool:
        """Whether the measured value is on the right side."""
        if self.at_least:
            return self.measured >= self.asked * (1 - self.noise)
        return self.measured <= self.asked * (1 + self.noise)

    def __str__(self) -> str:
        bound = "" if self.bound is None else f"{self.bound:.3f}"
        sign, verdict = ("≥" if self.at_least else "≤"), ("met" if self.met else "MISSED")
        if self.asked != self.bar:
            verdict += f" ({self.measured / (self.bound or 1):.1%} of the bound)"
        return f"{self.title:34} {self.what:34} {self.measured:8.3f}   {sign} {self.bar:<5} {bound:>6}  {verdict}"


@dataclass(frozen=True)
class Case:
    """One run of `bench train` and what is asked of it.

    efficiency: the bar of `method`; None: only not slower than the others. others: (method, bar of its step time over
    that of `method`).
    """

    group: str
    model: str
    link: str
    method: str
    efficiency: float | None
    others: tuple[tuple[str, float], ...] = (("ddp", 1.0),)
    device: str = "titan-x"
    compute_seconds: float | None = None

    @property
    def title(self) -> str:
        """Names the run in the table."""
        return f"{self.group} {self.model}, {self.link}"

    def config(self, steps: int, repeats: int, threshold: str) -> TrainConfig:
        """The run."""
        seconds = self.compute_seconds or STRETCH * model_table(self.model, self.device).iteration_seconds
        return TrainConfig(
            model=self.model,
            host_count=HOSTS,
            link=self.link,
            scale=SCALE,
            compute_seconds=seconds,
            methods=tuple(parse_methods(",".join([self.method, *(name for name, _ in self.others)]))),
            step_count=steps,
            repeat_count=repeats,
            options=priority_options(CLASSES, threshold),
            device=self.device,
            testbed=network_arguments(CLASSES, Switches.honour),
        )

    def judge(self, result: TrainResult) -> Iterator[Judged]:
        """The lines of a finished run."""
        mine = result.by_name(self.method)
        if self.efficiency is not None:
            bound = result.bound(mine)
            yield Judged(self.title, f"{self.method}: efficiency", mine.efficiency, self.efficiency, bound=bound)
        for name, bar in self.others:
            ratio = result.by_name(name).iteration_seconds / mine.iteration_seconds
            yield Judged(self.title, f"{self.method} against {name}", ratio, bar, noise=NOISE)


def cases() -> Iterator[Case]:
    """All training runs of the bars' table."""
    link = GridConfig().link
    for rate, bar in ((10.0, 0.97), (40.0, 0.98)):
        for model in PAPER_MODELS:
            yield Case("K40", model, link(rate), "overlap-ps", bar, device="k40")
    for model in ("AlexNet", "VGG19"):
        yield Case("K40", model, link(2.5), "overlap", 0.95, device="k40")
    yield balanced_case()
    bars = {"VGG19": 0.95, "VGG19-22K": 0.95, "AlexNet": 0.95, "GoogLeNet": None, "ResNet-50": 0.79}
    seconds = {"VGG19": 3.6, "VGG19-22K": 3.6}  # as in the tables of the other benchmarks
    for rate in (2.0, 10.0, 40.0):
        for model, least in bars.items():
            case = Case("Titan X", model, link(rate), "overlap", None, compute_seconds=seconds.get(model))
            if rate == 2.0:
                half_precision = (("ddp-fp16", 1.0),) if least == 0.95 else ()
                case = replace(case, efficiency=least, others=case.others + half_precision)
            yield case


def balanced_case() -> Case:
    """VGG-19 on ports that need as long for its bytes as it computes, against wait-free backpropagation alone."""
    case = Case("K40 balanced", "VGG19", "", "overlap-ps", None, (("wfbp-ps", 1.2),), device="k40")
    config = case.config(1, 1, "coarse")
    sent_bits = METHODS["overlap-ps"].closed_form_bytes(config.table, HOSTS) / 2 * 8
    return replace(case, link=format_rate(round(sent_bits / config.compute_seconds / HEADER_SHARE, -5)))


def urgent(repeats: int) -> Iterator[Judged]:
    """The urgent tensor's delay, and what it would be without the network's help."""
    with round_progress("urgent") as show:
        result = run_urgent(UrgentConfig("100mbit", 4 << 20, 32 << 20, repeats), show)
    yield Judged("urgent tensor", "time / alone, DSCP honoured", result.delay(True, 2).ratio, 1.15, at_least=False)
    yield Judged("urgent tensor", "time / alone, one class", result.delay(True, 1).ratio, 1.7)


def cost(repeats: int) -> Iterator[Judged]:
    """Scheduling on the host."""
    costs = measure_costs(CHUNK_COUNTS, VGG19_TENSOR_COUNT, repeats).costs
    for entry in costs:
        per_chunk = 1e6 * entry.seconds_per_chunk
        yield Judged("scheduling cost", f"µs per chunk of {entry.chunk_count}", per_chunk, 2.0, at_least=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="runs whose title contains this, such as K40, urgent or cost")
    parser.add_argument("--steps", type=int, default=2, help="measured steps per round")
    parser.add_argument("--repeats", type=int, default=3, help="rounds per method")
    parser.add_argument("--threshold", default="0.5", help="priority_threshold of Poseidon's methods")
    arguments = parser.parse_args()
    print(f"{'run':34} {'what':34} {'measured':>8}   {'bar':7} {'bound':>6}")
    if arguments.only in "scheduling cost":
        report(cost(arguments.repeats))
    if arguments.only in "urgent tensor":
        report(urgent(arguments.repeats))
    for case in cases():
        if arguments.only in case.title:
            with round_progress(case.title) as show:
                result = run_training(case.config(arguments.steps, arguments.repeats, arguments.threshold), show)
            report(case.judge(result))


def report(lines: Iterator[Judged]) -> None:
    """Prints lines of the table as they come."""
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    main()
