"""What a slow worker costs, and what it costs not to wait for it: drop, ssp and async compared with BSP.

Workers on this machine train a small network on real images. Sleep replaces most of the computation, so that few cores
are enough. The last rank is slow: in one of ten steps ("transient") or in every step ("persistent"). In the runs called
"skewed" it alone has two of the ten classes, so that the accuracy on these shows that it was dropped.

    python bench/stragglers.py                     # some six minutes; ends with the bars and whether they are met
    python bench/stragglers.py --slow 9 --json
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import poseidon.torch as poseidon
from datasets import Dataset, load
from poseidon.bench.hosts.fleet import LOOPBACK, Fleet, start_fleet
from poseidon.launch import free_port

TIME_BAR = 1.25  # drop and catching up beside a transient straggler: time of a step, undisturbed = 1
ACCURACY_BAR = 0.02  # ssp: final accuracy below that of BSP
RARE_CLASSES = (8, 9)  # that only the slow rank has in the skewed runs
TRANSIENT_EVERY = 10
POINT_EVERY = 10  # steps from one point of a learning curve to the next
PATIENCE_S = 900.0
WIDTH = 130  # of what is printed, in characters
NOTICE = r".*comes late"


@dataclass(frozen=True)
class Way:
    """How the workers deal with each other's speed."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    update: str = "worker"
    catches_up: bool = False


@dataclass(frozen=True)
class Case:
    """What makes a run slow: steps that the last rank sleeps longer in, and whether it has data of its own."""

    name: str
    slow_every: int  # 0: never
    skewed: bool = False


UNDISTURBED = Case("undisturbed", 0)
TRANSIENT = Case("transient", TRANSIENT_EVERY)
PERSISTENT = Case("persistent", 1)
SKEWED = Case("skewed", 1, skewed=True)


def ways(arguments: argparse.Namespace) -> dict[str, Way]:
    """By name."""
    drop = {"stragglers": "drop", "straggler_factor": arguments.straggler_factor}
    staleness = {"staleness": arguments.staleness}
    found = [
        Way("wait"),
        Way("drop", drop),
        Way("drop, catching up", drop, catches_up=True),
        Way("ssp", {"consistency": "ssp", **staleness}, "server"),
        Way("async", {"consistency": "async"}, "server"),
    ]
    return {way.name: way for way in found}


def schedule(arguments: argparse.Namespace) -> Iterator[tuple[Case, Way]]:
    """The runs, in order."""
    known = ways(arguments)
    yield UNDISTURBED, known["wait"]
    for case in (TRANSIENT, PERSISTENT):
        for way in known.values():
            yield case, way
    for name in ("wait", "drop", "drop, catching up"):
        yield SKEWED, known[name]


@dataclass
class RankRun:
    """What one rank saw of a run."""

    seconds: float  # for its own steps
    total_seconds: float  # until all ranks had made theirs
    batches: int  # that it computed
    digest: str  # of its parameters at the end
    late_steps: int  # that were completed without some of its gradients
    points: list[tuple[float, int, float]]  # of rank 0: seconds, steps, accuracy
    rare_accuracy: float


class Rank:
    """One rank, which trains in one run after the other."""

    def __init__(self, arguments: argparse.Namespace, data: Dataset, rank: int) -> None:
        self._arguments = arguments
        self._data = data
        self._rank = rank
        self._states: list[tuple[float, int, dict[str, torch.Tensor]]] = []

    def train(self, case: Case, way: Way, port: int) -> RankRun:
        """One run. `port` is free."""
        place = {"rank": self._rank, "world_size": self._arguments.ranks, "master_port": port}
        poseidon.init(**place, master_addr="127.0.0.1", timeout=PATIENCE_S, compute_threads=1, **way.options)
        try:
            return self._train(case, way)
        finally:
            poseidon.shutdown()

    def _train(self, case: Case, way: Way) -> RankRun:
        torch.manual_seed(self._arguments.seed)
        module = make_network(self._data, self._arguments.hidden)
        model = poseidon.DistributedDataParallel(module)
        inner = torch.optim.SGD(module.parameters(), lr=self._arguments.lr, momentum=0.9)
        optimizer = poseidon.DistributedOptimizer(inner, model, way.update)
        next_batch = self._batches(case.skewed)
        batches = 0
        self._states = []
        poseidon.barrier()
        start = time.monotonic()
        while optimizer.step_count < self._arguments.steps:
            images, labels = next_batch()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            self._compute(case, batches)
            loss.backward()
            optimizer.step()
            batches += 1
            if way.catches_up:
                for _ in optimizer.missed_steps():
                    optimizer.step()
            self._note_state(start, optimizer.step_count, module)
        optimizer.synchronize()
        seconds = time.monotonic() - start
        poseidon.barrier()
        total_seconds = time.monotonic() - start
        optimizer.pull_parameters()
        return self._result(module, seconds, total_seconds, batches)

    def _compute(self, case: Case, batch: int) -> None:
        """Sleeps as long as a larger network would compute."""
        own = self._arguments.step_ms / 1000
        slow = case.slow_every and self._rank == self._arguments.ranks - 1 and (batch + 1) % case.slow_every == 0
        time.sleep(own * (1 + self._arguments.slow) if slow else own)

    def _batches(self, skewed: bool) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        """This rank's batches, the same in every run on the same data."""
        labels = self._data.train_labels
        pool = torch.arange(len(labels))
        if skewed:
            rare = torch.isin(labels, torch.tensor(RARE_CLASSES))
            pool = pool[rare if self._rank == self._arguments.ranks - 1 else ~rare]
        generator = torch.Generator().manual_seed(1000 * self._arguments.seed + self._rank)

        def next_batch() -> tuple[torch.Tensor, torch.Tensor]:
            rows = pool[torch.randint(len(pool), (self._arguments.batch,), generator=generator)]
            return self._data.train_images[rows], labels[rows]

        return next_batch

    def _note_state(self, start: float, steps: int, module: nn.Module) -> None:
        """Keeps what rank 0 has, to be judged after the run."""
        due = steps // POINT_EVERY > (self._states[-1][1] // POINT_EVERY if self._states else 0)
        if self._rank == 0 and due:
            state = copy.deepcopy(module.state_dict())
            self._states.append((time.monotonic() - start, steps, state))

    def _result(self, module: nn.Module, seconds: float, total_seconds: float, batches: int) -> RankRun:
        digest = hashlib.blake2b(b"".join(p.detach().numpy().tobytes() for p in module.parameters())).hexdigest()
        late = sum(entry.late_steps for entry in poseidon.straggler_report() if entry.rank == self._rank)
        run = RankRun(seconds, total_seconds, batches, digest, late, [], 0.0)
        if self._rank == 0:
            run.rare_accuracy = self._accuracy(module, RARE_CLASSES)
            states, self._states = self._states, []
            final = (seconds, self._arguments.steps, copy.deepcopy(module.state_dict()))
            for seconds_then, steps, state in [*states, final]:
                module.load_state_dict(state)
                run.points.append((seconds_then, steps, self._accuracy(module)))
        return run

    @torch.no_grad()
    def _accuracy(self, module: nn.Module, classes: tuple[int, ...] = ()) -> float:
        """On the test set, or its pictures of these classes."""
        images, labels = self._data.test_images, self._data.test_labels
        if classes:
            chosen = torch.isin(labels, torch.tensor(classes))
            images, labels = images[chosen], labels[chosen]
        most = self._arguments.test_images
        return float((module(images[:most]).argmax(1) == labels[:most]).float().mean())


def make_network(data: Dataset, width: int) -> nn.Module:
    """A perceptron with one hidden layer."""
    pixels = data.train_images[0].numel()
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, width), nn.ReLU(), nn.Linear(width, 10))


@dataclass
class Run:
    """All ranks' view of one run."""

    case: str
    way: str
    step_ms: float  # of the steps of rank 0
    total_step_ms: float  # the same until the slow rank has made its last one, too
    seconds_to_target: float | None  # on rank 0
    accuracy: float  # at the end
    rare_accuracy: float  # on the classes that only the slow rank has in skewed runs
    dropped: list[float]  # share of the steps that are without some of this rank's gradients
    batches: list[int]  # that each rank computed
    equal_replicas: bool


def measure(fleet: Fleet, case: Case, way: Way, arguments: argparse.Namespace) -> Run:
    ranks: list[RankRun] = fleet.call_same("train", case, way, free_port(), timeout_seconds=PATIENCE_S)
    first, steps = ranks[0], arguments.steps
    reached = [seconds for seconds, _, accuracy in first.points if accuracy >= arguments.target]
    return Run(
        case.name,
        way.name,
        1000 * first.seconds / steps,
        1000 * max(run.total_seconds for run in ranks) / steps,
        reached[0] if reached else None,
        first.points[-1][2],
        first.rare_accuracy,
        [run.late_steps / steps for run in ranks],
        [run.batches for run in ranks],
        all(run.digest == first.digest for run in ranks),
    )


@dataclass(frozen=True)
class Bar:
    """Something that has to hold."""

    text: str
    value: str
    met: bool


def bars(runs: list[Run]) -> list[Bar]:
    """What is judged."""
    found = {(run.case, run.way): run for run in runs}
    unequal = [f"{run.case}: {run.way}" for run in runs if not run.equal_replicas]
    judged = [Bar("replicas are equal bit for bit at the end of every run", ", ".join(unequal) or "all", not unequal)]
    calm = found[UNDISTURBED.name, "wait"].step_ms
    ratio = found[TRANSIENT.name, "drop, catching up"].total_step_ms / calm
    text = f"transient, drop and catching up: a step takes at most {TIME_BAR} of an undisturbed one"
    judged.append(Bar(text, f"{ratio:.2f}", ratio <= TIME_BAR))
    for case in (TRANSIENT.name, PERSISTENT.name):
        loss = found[case, "wait"].accuracy - found[case, "ssp"].accuracy
        text = f"{case}: ssp ends at most {100 * ACCURACY_BAR:.0f} points below BSP after as many steps"
        judged.append(Bar(text, f"{100 * loss:+.1f}", loss <= ACCURACY_BAR))
    return judged


def as_table(runs: list[Run], target: float) -> Table:
    """For people. Of gradients dropped and batches computed: the slow rank's, and the most of any other."""
    table = Table()
    heads = (
        "case",
        "way",
        "ms a step",
        "all done",
        f"s to {target:.2f}",
        "accuracy",
        "rare",
        "dropped",
        "of others",
        "batches",
    )
    for index, head in enumerate(heads):
        table.add_column(head, justify="left" if index < 2 else "right")
    for run in runs:
        table.add_row(
            run.case,
            run.way,
            f"{run.step_ms:.1f}",
            f"{run.total_step_ms:.1f}",
            "–" if run.seconds_to_target is None else f"{run.seconds_to_target:.2f}",
            f"{run.accuracy:.3f}",
            f"{run.rare_accuracy:.3f}",
            f"{100 * run.dropped[-1]:.0f} %",
            f"{100 * max(run.dropped[:-1]):.0f} %",
            str(run.batches[-1]),
        )
    return table


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="workers, 3 or more: a step needs more than half of them")
    parser.add_argument("--steps", type=int, default=300, help="of each run")
    parser.add_argument("--step-ms", type=float, default=30, help="sleep of every step")
    parser.add_argument("--slow", type=float, default=4, help="a slow step sleeps so many times longer in addition")
    parser.add_argument("--straggler-factor", type=float, default=3.0)
    parser.add_argument("--staleness", type=int, default=3)
    parser.add_argument("--dataset", default="auto", choices=["auto", "fashion-mnist", "digits"])
    parser.add_argument("--hidden", type=int, default=128, help="width of the hidden layer")
    parser.add_argument("--batch", type=int, default=32, help="examples per worker and step")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--target", type=float, default=0.8, help="test accuracy to reach")
    parser.add_argument("--test-images", type=int, default=5000, help="how many of the test set to judge on")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print JSON to standard output")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    console = Console(stderr=arguments.json, highlight=False, width=WIDTH)
    torch.set_num_threads(1)  # before any work: the workers are forked, and threads do not survive that
    warnings.filterwarnings("ignore", NOTICE)  # that the slow worker is late is known here
    data = load(arguments.dataset)
    runs = []
    with start_fleet([LOOPBACK] * arguments.ranks, lambda rank: Rank(arguments, data, rank)) as fleet:
        for case, way in schedule(arguments):
            runs.append(measure(fleet, case, way, arguments))
            console.print(f"{case.name}, {way.name}: {runs[-1].total_step_ms:.1f} ms a step", style="dim")
    console.print(
        f"{data.name}; {arguments.ranks} workers, {arguments.steps} steps of {arguments.step_ms:g} ms; ", end=""
    )
    console.print(f"a slow step takes {1 + arguments.slow:g} times as long")
    console.print(as_table(runs, arguments.target))
    judged = bars(runs)
    for bar in judged:
        console.print(f"{bar.text}: {bar.value}, {'met' if bar.met else 'MISSED'}")
    if arguments.json:
        parts = {"dataset": data.name, "runs": [asdict(run) for run in runs], "bars": [asdict(bar) for bar in judged]}
        print(json.dumps({**vars(arguments), **parts}, indent=2))
    return 0 if all(bar.met for bar in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
