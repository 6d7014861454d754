#!/usr/bin/env python3
"""What jobs on one server lose to each other, and to one that behaves badly: `python bench/tenants.py`. Needs root.

Jobs of replayed workers share one dedicated server with one core. Every worker and the server has a host of its own in
a network namespace. A job's *demand* is what the busier direction of the server's port carries for it when it trains
alone. The parts, with their bars:

    room   the server's port has 1.25 × the summed demand. Each job loses at most 5 % of its step time against being
           alone on the same port (Parameter Hub, Figure 18).
    short  the port has half of the summed demand. Each job gets its share of what goes through, within 5 %. It takes
           four times the steps.
    bad    a further job behaves badly beside them, on a port with 1.25 × all demands. The other jobs lose at most 5 %
           of their step time against the same job that behaves well, and their parameters are the same bits.
           floods: it sends tiny messages. stalls: it is stopped in the middle of a push. dies: it is killed there,
           again and again. is greedy: it asks for more memory than `memory_limit` permits, again and again; it alone
           gets an error.

Weights and times are scaled: both dimensions of every weight are divided by --scale, compute times are multiplied by
--stretch, and ports are slower by scale² × stretch. The exit status is 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from signal import Signals
from statistics import median
from typing import Any

from poseidon.errors import PoseidonError
from poseidon.models import MODELS, model_table, scaled
from poseidon.options.secret import VARIABLE, fresh
from poseidon.rates import parse_rate
from tenancy.hosts import JobRun, Setup, Tenants, tenants
from tenancy.neighbour import Conduct, Neighbour

# With few steps, a step more or less is itself several percent of a share.
SHORT_STEPS = 4  # times the steps of the other parts
BAR = 0.05  # of step time that a job may lose, and by which its share may deviate
ROOM, SHORT = 1.25, 0.5  # of the summed demand
MEMORY = 32  # the server's memory_limit, in sizes of the model
PARTS = ("room", "short", "bad")
GOOD = Conduct("behaves well")
BAD = (
    Conduct("floods", options={"chunk_bytes": 64}),
    Conduct("stalls", signal=Signals.SIGSTOP),
    Conduct("dies", signal=Signals.SIGKILL),
    Conduct("is greedy", size=2 * MEMORY, refused=True),
)


@dataclass(frozen=True)
class Case:
    """One model with the command line's sizes."""

    setup: Setup
    step_count: int
    link_bits_per_second: float

    @property
    def size_bytes(self) -> int:
        """Of the gradients of one worker."""
        return self.setup.table.parameter_count * 4


def jain_index(rates: Sequence[float]) -> float:
    """Jain's index of fairness: 1 where all rates are equal, 1/N where one of N has everything."""
    return sum(rates) ** 2 / (len(rates) * sum(rate * rate for rate in rates))


def alone(running: Tenants, case: Case) -> JobRun:
    """The last job, whose options are never its own."""
    job = case.setup.job_count - 1
    return running.run({job: case.step_count})[job]


def together(running: Tenants, case: Case, step_seconds: float, longer: int = 1) -> tuple[list[JobRun], float]:
    """All jobs, begun at moments spread over a step; and the seconds of CPU time that the server took for each one."""
    count = case.setup.job_count
    delays = [job * step_seconds / count for job in range(count)]
    cpu_seconds, began = running.server_cpu_seconds(), time.monotonic()
    runs = running.run(dict.fromkeys(range(count), longer * case.step_count), delays)
    cpu = (running.server_cpu_seconds() - cpu_seconds) / (time.monotonic() - began)
    return list(runs.values()), cpu


def verdict(what: str, value: float) -> bool:
    """Prints a bar. Returns whether it is met."""
    met = value <= BAR
    print(f"    {what}: {value:.1%}, bar {BAR:.0%}: {'PASS' if met else 'MISS'}", flush=True)
    return met


def losses(runs: Sequence[JobRun], than: Sequence[float]) -> list[float]:
    """The part of its step time that each job loses."""
    return [run.median / before - 1 for run, before in zip(runs, than, strict=True)]


def percents(values: Sequence[float]) -> str:
    return " ".join(f"{value:+.1%}" for value in values)


def measure_demand(running: Tenants, case: Case) -> float:
    """Bits per second of one job alone, on a port that is faster than those of its workers."""
    running.set_port(2 * case.setup.worker_count * case.link_bits_per_second)
    run = alone(running, case)
    print(f"  demand of a job: {run.bits_per_second / 1e6:.1f} Mb/s, {run.median:.3f} s a step", flush=True)
    return run.bits_per_second


def measure_room(running: Tenants, case: Case, demand: float) -> bool:
    port = ROOM * demand * case.setup.job_count
    running.set_port(port)
    before = alone(running, case).median
    runs, cpu = together(running, case, before)
    lost = losses(runs, [before] * len(runs))
    print(f"  room: port {port / 1e6:.1f} Mb/s, alone {before:.3f} s a step, server's CPU {cpu:.0%} of a core")
    print(f"    lost: {percents(lost)}")
    return verdict("a job loses at most", max(lost))


def measure_short(running: Tenants, case: Case, demand: float) -> bool:
    port = SHORT * demand * case.setup.job_count
    running.set_port(port)
    runs, cpu = together(running, case, case.setup.compute_seconds, SHORT_STEPS)
    rates = [run.bits_per_second for run in runs]
    shares = [rate / sum(rates) * len(rates) - 1 for rate in rates]
    print(
        f"  short: port {port / 1e6:.1f} Mb/s, of which the jobs get {sum(rates) / port:.0%}, "
        f"server's CPU {cpu:.0%} of a core"
    )
    print(f"    shares against equal ones: {percents(shares)}; Jain's index {jain_index(rates):.4f}", flush=True)
    return verdict("a job's share is off by at most", max(map(abs, shares)))


def digests(runs: Sequence[JobRun]) -> set[str]:
    """Of the parameters of all workers of all jobs: one if all have the same bits."""
    return {digest for run in runs for digest in run.digests}


def beside(
    running: Tenants, case: Case, conduct: Conduct, options: Mapping[str, Any]
) -> tuple[list[JobRun], Neighbour]:
    """All jobs beside a neighbour. Raises PoseidonError if the neighbour has not behaved as it should have."""
    with Neighbour(running, conduct, case.size_bytes, options) as neighbour:
        runs, cpu = together(running, case, case.setup.compute_seconds)
    if neighbour.objection:
        raise PoseidonError(f"the measurement beside one that {conduct.name} says nothing: {neighbour.objection}")
    print(
        f"  {conduct.name}: {median(run.median for run in runs):.3f} s a step, server's CPU {cpu:.0%} of a core, "
        f"{neighbour.starts} processes"
    )
    return runs, neighbour


def measure_bad(running: Tenants, case: Case, demand: float) -> bool:
    running.set_port(ROOM * (demand * case.setup.job_count + case.link_bits_per_second))
    options = {"chunk_bytes": 4096, "priority_classes": 1}
    good, _ = beside(running, case, GOOD, options)
    met = True
    for conduct in BAD:
        runs, neighbour = beside(running, case, conduct, options)
        lost = losses(runs, [run.median for run in good])
        print(f"    lost: {percents(lost)}")
        met &= verdict(f"beside one that {conduct.name}, a job loses at most", max(lost))
        if len(digests(good) | digests(runs)) > 1:
            print("    the jobs' parameters differ: MISS")
            met = False
        if neighbour.said:
            print(f"    the neighbour was told: {neighbour.said[0]}")
    return met


def measure(case: Case, parts: Sequence[str]) -> bool:
    """Measures the parts of one model."""
    met = True
    with tenants(case.setup) as running:
        demand = measure_demand(running, case)
        if "room" in parts:
            met &= measure_room(running, case, demand)
        if "short" in parts:
            met &= measure_short(running, case, demand)
        if "bad" in parts:
            met &= measure_bad(running, case, demand)
    return met


def case_of(name: str, arguments: argparse.Namespace) -> Case:
    """The model as the arguments scale it; says so."""
    full = model_table(name)
    link = parse_rate(arguments.port) / (arguments.scale**2 * arguments.stretch)
    table = scaled(full, arguments.scale)
    setup = Setup(
        table=table,
        compute_seconds=full.iteration_seconds * arguments.stretch,
        scale=arguments.scale,
        job_count=arguments.jobs,
        worker_count=arguments.workers,
        link=f"{round(link)}bit",
        server={"memory_limit": str(MEMORY * table.parameter_count * 4)},
    )
    slower = arguments.scale**2 * arguments.stretch
    print(
        f"{name}: {arguments.jobs} jobs of {arguments.workers} workers. Both dimensions of weights are divided by "
        f"{arguments.scale}: {table.parameter_count * 4 / 1e6:.2f} MB. Compute is {arguments.stretch:g} times as long: "
        f"{setup.compute_seconds:.2f} s. Workers' ports have {arguments.port} / {slower:g}: {link / 1e6:.1f} Mb/s."
    )
    return Case(setup, arguments.steps, link)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=MODELS, help="may be repeated; default AlexNet, ResNet-50")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2, help="of each job, at least 2")
    parser.add_argument("--port", default="10gbit", help="of each worker, before it is scaled")
    parser.add_argument("--scale", type=int, default=8, help="divisor of both dimensions of every weight")
    parser.add_argument("--stretch", type=float, default=8.0, help="factor of the compute times")
    parser.add_argument("--steps", type=int, default=6, help="of each job in each measurement, after two more")
    parser.add_argument("--parts", default=",".join(PARTS), help="which to measure")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}: give some of {','.join(PARTS)}")
    if arguments.jobs < 2 or arguments.workers < 2:
        parser.error("give at least 2 --jobs, which share the server, of at least 2 --workers, which exchange")
    os.environ[VARIABLE] = fresh()  # every process here has it
    met = True
    try:
        for name in arguments.model or ("AlexNet", "ResNet-50"):
            met &= measure(case_of(name, arguments), parts)
    except PoseidonError as error:
        sys.exit(f"tenants.py: {error}")
    print("every bar is met" if met else "a bar is MISSED")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
