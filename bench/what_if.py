#!/usr/bin/env python3
"""Runs that `poseidon what-if` predicts from the record of another run: `python bench/what_if.py`. Needs root.

One run is recorded: a perceptron on 4 hosts in network namespaces with ports of a limited rate. Each change is then
predicted from its record alone, and run. Printed are both steps and the difference. "--rounds" repeats all.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from statistics import median

from poseidon.adapter.run_record import load_run
from poseidon.launch import launch
from poseidon.planner import Change, RecordedRun, read_run, what_if
from poseidon.testbed import Testbed

WIDTH, BATCH = 1024, 32
STEPS = {False: 16, True: 66}  # with overlap the threshold of priorities is searched first
MEDIAN_BAR, WORST_BAR = 0.03, 0.08


@dataclass(frozen=True)
class Run:
    """How a run is started. `slow_s`: what rank 1 sleeps in each step. `slow_port`: by how much host 2's is slower."""

    hosts: int = 4
    mbit: float = 40.0
    scheme: str = "auto"
    wire: str = "fp32"
    overlap: bool = False
    slow_s: float = 0.0
    slow_port: float = 1.0


CASES: list[tuple[Run, Run, Change]] = [
    (Run(), replace(Run(), mbit=80.0), Change(link="2x")),
    (Run(), replace(Run(), mbit=160.0), Change(link="4x")),
    (Run(), replace(Run(), mbit=20.0), Change(link="0.5x")),
    (Run(), replace(Run(), hosts=2), Change(hosts=2)),
    (Run(), replace(Run(), hosts=6), Change(hosts=6)),
    (Run(), replace(Run(), scheme="ps"), Change(scheme="ps")),
    (Run(), replace(Run(), wire="bf16"), Change(wire="bf16")),
    (Run(), replace(Run(), overlap=True), Change(overlap=True)),
    (Run(scheme="ps"), replace(Run(scheme="ps"), mbit=80.0), Change(link="2x")),
    (Run(overlap=True), replace(Run(overlap=True), mbit=80.0), Change(link="2x")),
    (Run(slow_s=0.2), Run(), Change(straggler=False)),
    (Run(slow_s=0.2), replace(Run(slow_s=0.2), mbit=80.0), Change(link="2x")),
    (Run(slow_port=4.0), Run(), Change(slow_port=False)),
    (Run(scheme="ps", mbit=200.0, slow_port=2.5), Run(scheme="ps", mbit=200.0), Change(slow_port=False)),
]


def train(overlap: bool, slow_s: float) -> None:
    """One worker."""
    import torch

    import poseidon.torch as poseidon

    poseidon.init()
    torch.manual_seed(0)
    sizes = [WIDTH] * 4 + [10]
    layers = [torch.nn.Linear(size, following) for size, following in itertools.pairwise(sizes)]
    model = poseidon.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if overlap:
        optimizer = poseidon.DistributedOptimizer(optimizer, model)
    inputs, labels = torch.randn(BATCH, WIDTH), torch.randint(0, 10, (BATCH,))
    for _ in range(STEPS[overlap]):
        if poseidon.rank() == 1:
            time.sleep(slow_s)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    poseidon.shutdown()


def recorded(run: Run) -> RecordedRun:
    """Runs, and reads what was recorded."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"scheme": run.scheme, "wire": run.wire, "record": folder, "revise": "off", "timeout": "60"}
        environment = {f"POSEIDON_{name.upper()}": value for name, value in options.items()}
        command = [sys.executable, __file__, "--worker", str(int(run.overlap)), str(run.slow_s)]
        with Testbed(run.hosts, f"{run.mbit:g}mbit") as hosts:
            if run.slow_port > 1:
                hosts.set_rate(2, f"{run.mbit / run.slow_port:g}mbit")
            codes = launch(command, run.hosts, testbed=hosts, env={**environment, "OMP_NUM_THREADS": "1"})
        if any(codes):
            sys.exit(f"{run} failed: its message is above")
        return read_run(load_run(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return train(bool(int(args.worker[0])), float(args.worker[1]))
    errors = []
    for _ in range(args.rounds):
        known: dict[Run, RecordedRun] = {}
        for base, changed, change in CASES:
            for run in (base, changed):
                known[run] = known.get(run) or recorded(run)
            (predicted,) = what_if(known[base], [change]).changes
            step_s, measured_s = predicted.step.step_s, known[changed].step_s
            errors.append(step_s / measured_s - 1)
            words = f"{asdict(base)} -> {predicted.words}"
            print(f"{words}: {step_s:.4f} s predicted, {measured_s:.4f} s measured ({errors[-1]:+.1%})", flush=True)
    sizes = [abs(error) for error in errors]
    met = "bars met" if median(sizes) <= MEDIAN_BAR and max(sizes) <= WORST_BAR else "bars MISSED"
    print(f"{len(sizes)} changes: median error {median(sizes):.1%}, worst {max(sizes):.1%}; {met}")
    return None


if __name__ == "__main__":
    main()
