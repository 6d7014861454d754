"""Accuracy with fewer bits: real training under each lossy choice, beside fp32, by step and by second.

Three tasks: a CNN on Fashion-MNIST, a GPT of two layers on Python's help texts, a DLRM on synthetic clicks
(accuracy_tasks.py). The choices are the wire formats, the schemes whose traits say that they are lossy, and LocalSGD
with every=8. A seed decides the first parameters and the batches. All choices have the same of both, and take turns in
the same two processes, segment by segment, so the machine's load is the same for all. Evaluation is not timed. Layers
do not travel in groups, which would be exact under lossy schemes and bf16 under int8.

The bar: in each task the mean final accuracy of int8 differs from that of fp32 by no more than fp32's spread, which is
its best seed minus its worst one. The exit status is 1 if a task misses it. One seed alone has no spread, and is not
judged.

    python bench/accuracy.py --plot accuracy.svg
    python bench/accuracy.py --tasks cnn --choices fp32 onebit --curves loss --plot loss.svg   # Poseidon, Figure 11
    python bench/accuracy.py --tasks cnn --link 50mbit     # root and iproute2: seconds on a slow network
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from statistics import fmean

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the store warns of hosts without a name

import torch
import torch._dynamo  # the first optimizer of a process imports it, which is slow; forked workers share this import
from torch import Tensor, nn

import poseidon.torch as poseidon
from accuracy_tasks import TASKS, Examples, Task
from poseidon.bench.drawing import COLOURS
from poseidon.bench.hosts.fleet import Fleet, Place, hosts_on, start_fleet
from poseidon.launch import free_port
from poseidon.report.svg import Scale, number_text, ticks
from poseidon.schemes import SCHEMES

TIMEOUT_S = 300.0
HOSTS = 2
EVERY = 8  # steps between two averagings of LocalSGD
EXACT, JUDGED, LOCAL_SGD = "fp32", "int8", "local-sgd"
WIRES = (EXACT, "bf16", "fp16", JUDGED)
LOSSY_SCHEMES = tuple(name for name, traits in SCHEMES.items() if getattr(traits, "lossy", False))
CHOICES = (*WIRES, *LOSSY_SCHEMES, LOCAL_SGD)


@dataclass
class Curve:
    """One training. points: (steps, seconds trained, mean training loss of the segment, test accuracy)."""

    task: str
    choice: str
    seed: int
    points: list[tuple[int, float, float, float]] = field(default_factory=list)


@dataclass
class Training:
    """A replica, as it is called and as it is evaluated."""

    module: nn.Module
    bare: nn.Module
    optimizer: torch.optim.Optimizer


class Host:
    """One worker, with a model for each choice."""

    def __init__(self, tasks: dict[str, Task], places: Sequence[Place], rank: int, port: int) -> None:
        self._tasks, self._rank = tasks, rank
        torch.set_num_threads(1)  # the hosts share this machine's cores
        poseidon.init(
            rank=rank,
            world_size=len(places),
            master_addr=places[0].address,
            master_port=port,
            timeout=TIMEOUT_S,
            compute_threads=1,
            small_bytes=0,  # small layers travel in groups, exact under lossy schemes and as bf16 under int8
        )
        self._trainings: dict[str, Training] = {}

    def begin(self, task: str, choices: Sequence[str], seed: int) -> None:
        """Makes the choices' models anew."""
        self._trainings = {choice: self._build(self._tasks[task], choice, seed) for choice in choices}

    def train(self, task_name: str, choice: str, seed: int, first: int, count: int) -> tuple[float, float, float]:
        """Returns the monotonic times of start and end, and the mean loss of this worker's batches."""
        task, training = self._tasks[task_name], self._trainings[choice]
        training.bare.train()
        losses = []
        start = time.monotonic()
        for step in range(first, first + count):
            training.optimizer.zero_grad(set_to_none=True)
            loss = _loss(training.module, self._batch(task, seed, step))
            loss.backward()
            training.optimizer.step()
            losses.append(loss.item())
        return start, time.monotonic(), fmean(losses)

    @torch.no_grad()
    def evaluate(self, task_name: str, choice: str) -> tuple[float | None, str]:
        """The accuracy on the test set, on rank 0, and a hash of the parameters, which are equal on all ranks."""
        bare, test = self._trainings[choice].bare, self._tasks[task_name].test
        digest = hashlib.sha256()
        for parameter in bare.parameters():
            digest.update(parameter.numpy().tobytes())
        if self._rank != 0:
            return None, digest.hexdigest()
        bare.eval()
        right = 0
        for start in range(0, len(test.classes), 500):
            part = test.rows(slice(start, start + 500))
            right += int((bare(*part.inputs).argmax(-1) == part.classes).sum())
        return right / test.classes.numel(), digest.hexdigest()

    def close(self) -> None:
        """Ends the connections."""
        self._trainings.clear()
        poseidon.shutdown()

    def _build(self, task: Task, choice: str, seed: int) -> Training:
        torch.manual_seed(seed)
        bare = task.model()
        optimizer = task.optimizer(bare)
        if choice == LOCAL_SGD:
            return Training(bare, bare, poseidon.LocalSGD(bare, optimizer, every=EVERY))
        how = {"wire": choice} if choice in WIRES else {"scheme": choice}
        return Training(poseidon.DistributedDataParallel(bare, **how), bare, optimizer)

    def _batch(self, task: Task, seed: int, step: int) -> Examples:
        """This worker's part of the step's examples, which are drawn with replacement."""
        generator = torch.Generator().manual_seed(1_000_000 * (seed + 1) + step)
        drawn = torch.randint(len(task.train.classes), (HOSTS, task.batch), generator=generator)
        return task.train.rows(drawn[self._rank])


def _loss(module: nn.Module, batch: Examples) -> Tensor:
    scores = module(*batch.inputs)
    return nn.functional.cross_entropy(scores.flatten(0, -2), batch.classes.flatten())


def train_all(args: argparse.Namespace, tasks: dict[str, Task], fleet: Fleet) -> list[Curve]:
    """Trains every task with every seed under every choice."""
    curves = []
    for name, task in tasks.items():
        for seed in range(args.seeds):
            fleet.call_same("begin", name, args.choices, seed, timeout_seconds=TIMEOUT_S)
            turns = [Curve(name, choice, seed) for choice in args.choices]
            for first in range(0, args.steps or task.steps, args.segment):
                for curve in turns:
                    _train_on(curve, fleet, first, args.segment)
            curves += turns
    return curves


def _train_on(curve: Curve, fleet: Fleet, first: int, count: int) -> None:
    """One segment of one training. Ends the program if the replicas differ."""
    asked = (curve.task, curve.choice, curve.seed, first, count)
    times = fleet.call_same("train", *asked, timeout_seconds=TIMEOUT_S)
    answers = fleet.call_same("evaluate", curve.task, curve.choice, timeout_seconds=TIMEOUT_S)
    if len({digest for _, digest in answers}) > 1:
        raise SystemExit(f"the replicas differ: {curve.task}, {curve.choice}, after step {first + count}")
    before = curve.points[-1][1] if curve.points else 0.0
    seconds = max(end for _, end, _ in times) - min(start for start, _, _ in times)
    curve.points.append((first + count, before + seconds, fmean(loss for *_, loss in times), answers[0][0]))


def final_accuracies(curves: Sequence[Curve], task: str, choice: str) -> list[float]:
    """The accuracy after the last step, seed by seed."""
    return [curve.points[-1][3] for curve in curves if (curve.task, curve.choice) == (task, choice)]


def spread(values: Sequence[float]) -> float:
    """The best minus the worst."""
    return max(values) - min(values)


def verdicts(curves: Sequence[Curve]) -> dict[str, bool]:
    """For each task with int8, fp32 and several seeds: whether int8 is within fp32's spread."""
    met = {}
    for task in dict.fromkeys(curve.task for curve in curves):
        exact, judged = (final_accuracies(curves, task, choice) for choice in (EXACT, JUDGED))
        if len(exact) > 1 and judged:
            met[task] = abs(fmean(judged) - fmean(exact)) <= spread(exact)
    return met


def print_table(curves: Sequence[Curve], tasks: dict[str, Task]) -> None:
    """One line for each task and choice, in per cent; seconds are the mean over the seeds."""
    heads = ("task", "choice", "steps", "final loss", "final accuracy %", "against fp32", "spread", "seconds")
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for name, task in tasks.items():
        exact = final_accuracies(curves, name, EXACT)
        for choice in dict.fromkeys(curve.choice for curve in curves):
            own = [curve.points[-1] for curve in curves if (curve.task, curve.choice) == (name, choice)]
            accuracies = [100 * accuracy for *_, accuracy in own]
            against = f"{fmean(accuracies) - 100 * fmean(exact):+.2f}" if exact else "–"
            seconds, loss = (fmean(point[column] for point in own) for column in (1, 2))
            numbers = f"{loss:.3f} | {fmean(accuracies):.2f} | {against} | {spread(accuracies):.2f} | {seconds:.2f}"
            print(f"| {task.title} | {choice} | {own[0][0]} | {numbers} |")
    for name, met in verdicts(curves).items():
        print(f"{name}: int8 within the spread of fp32's seeds: {'met' if met else 'MISSED'}")


@dataclass(frozen=True)
class Axes:
    """What a panel shows: columns of `Curve.points`, and what the second one's numbers become."""

    title: str
    across: int
    up: int
    shown: Callable[[float], float] = lambda value: value


AXES = {
    "accuracy": (
        Axes("accuracy % by step", 0, 3, lambda share: 100 * share),
        Axes("accuracy % by second", 1, 3, lambda share: 100 * share),
    ),
    "loss": (Axes("training loss by step", 0, 2), Axes("test error % by step", 0, 3, lambda share: 100 * (1 - share))),
}


def plot(curves: Sequence[Curve], tasks: dict[str, Task], kind: str) -> str:
    """An SVG: a row for each task, with the two panels of AXES[kind], as means over the seeds."""
    width, height = 400, 230
    choices = list(dict.fromkeys(curve.choice for curve in curves))
    canvas = f"{2 * width} {len(tasks) * height + 30}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {canvas}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for row, (name, task) in enumerate(tasks.items()):
        for column, axes in enumerate(AXES[kind]):
            lines = {choice: _means(curves, name, choice, axes) for choice in choices}
            parts.append(f'<g transform="translate({column * width},{row * height})">')
            parts += [*_panel(f"{task.title}: {axes.title}", lines, width, height), "</g>"]
    for index, choice in enumerate(choices):
        x, y = 45 + index * 95, len(tasks) * height + 12
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{COLOURS[index % len(COLOURS)]}"/>')
        parts.append(f'<text x="{x + 17}" y="{y}">{escape(choice)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _means(curves: Sequence[Curve], task: str, choice: str, axes: Axes) -> list[tuple[float, float]]:
    """The points of a panel, each the mean over the seeds."""
    seeds = [curve.points for curve in curves if (curve.task, curve.choice) == (task, choice)]
    return [
        (fmean(point[axes.across] for point in same), axes.shown(fmean(point[axes.up] for point in same)))
        for same in zip(*seeds, strict=True)
    ]


def _panel(title: str, lines: dict[str, list[tuple[float, float]]], width: int, height: int) -> list[str]:
    points = [point for line in lines.values() for point in line]
    across = Scale(0, max(x for x, _ in points), 45, width - 20)
    up = Scale(min(y for _, y in points), max(y for _, y in points), height - 35, 32)
    parts = [f'<text x="45" y="18" font-weight="bold">{escape(title)}</text>']
    for y in ticks(up.low, up.high):
        parts.append(f'<line x1="45" y1="{up(y):.1f}" x2="{width - 20}" y2="{up(y):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="39" y="{up(y) + 4:.1f}" text-anchor="end">{number_text(y)}</text>')
    for x in ticks(0, across.high):
        parts.append(f'<text x="{across(x):.1f}" y="{height - 17}" text-anchor="middle">{number_text(x)}</text>')
    for index, line in enumerate(lines.values()):
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in line)
        colour = COLOURS[index % len(COLOURS)]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    return parts


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--choices", nargs="+", choices=CHOICES, default=list(CHOICES))
    parser.add_argument("--seeds", type=int, default=3, help="0, 1, … up to so many")
    parser.add_argument("--steps", type=int, help="of each training, in whole segments; default: the task's own")
    parser.add_argument("--segment", type=int, default=32, help=f"steps between two evaluations, a multiple of {EVERY}")
    parser.add_argument("--link", default="none", help="rate of both ports; none: loopback, unshaped")
    parser.add_argument("--plot", metavar="FILE.svg", type=Path, help="draw the curves")
    parser.add_argument("--curves", choices=AXES, default="accuracy", help="what --plot draws")
    parser.add_argument("--json", action="store_true", help="print JSON with all curves to standard output")
    args = parser.parse_args()
    if args.segment < 1 or args.segment % EVERY:
        parser.error(f"--segment must be a multiple of {EVERY}: LocalSGD's replicas are equal only after an averaging")
    if args.seeds < 1 or (args.steps is not None and args.steps < 1):
        parser.error("--seeds and --steps must be at least 1")
    return args


def main() -> int:
    args = parse_arguments()
    torch.set_num_threads(1)  # before any work: the workers are forked, and threads do not survive that
    tasks = {name: TASKS[name]() for name in args.tasks}
    with hosts_on(HOSTS, None if args.link == "none" else args.link) as (places, _):
        port = free_port()
        with start_fleet(places, lambda rank: Host(tasks, places, rank, port)) as fleet:
            curves = train_all(args, tasks, fleet)
            fleet.call_same("close", timeout_seconds=TIMEOUT_S)
    if args.plot is not None:
        args.plot.write_text(plot(curves, tasks, args.curves))
    met = verdicts(curves)
    if args.json:
        print(json.dumps({"link": args.link, "int8_met": met, "curves": [asdict(curve) for curve in curves]}, indent=2))
    else:
        print_table(curves, tasks)
    return 0 if all(met.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
