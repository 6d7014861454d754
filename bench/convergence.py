"""Time to the same test accuracy on shaped ports: real training on the processor, Poseidon against torch DDP.

The network is a perceptron with two wide hidden layers, so nearly all of its parameters sit in fully connected layers.
All methods start from the same parameters, see the same batches and take turns in the same processes, segment by
segment; evaluation is not timed.

    python bench/convergence.py --hosts 4 --link 100mbit        # root and iproute2; --link none: loopback, unshaped
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the store warns of hosts without a name

import torch
from rich.console import Console
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from datasets import Dataset, load
from poseidon.bench.hosts.fleet import Fleet, Place, hosts_on, start_fleet
from poseidon.bench.training.connections import Bare, HostConnections, Trainer
from poseidon.bench.training.methods import METHODS, Method, parse_methods
from poseidon.launch import free_port

TIMEOUT_S = 300.0


@dataclass
class Progress:
    """One method's way to the target. points: (seconds trained, steps, test accuracy) after each segment."""

    method: str
    points: list[tuple[float, int, float]] = field(default_factory=list)
    seconds_to_target: float | None = None


class ConvergenceHost:
    """Trains one replica per method on this rank's share of every batch."""

    def __init__(self, args: argparse.Namespace, data: Dataset, places: Sequence[Place], rank: int, port: int) -> None:
        self._args = args
        self._data = data
        self._rank = rank
        self._connections = HostConnections(
            places, rank, port, timeout_seconds=TIMEOUT_S, options={"compute_threads": 1}
        )
        self._models: dict[str, nn.Module] = {}
        self._step_counts: dict[str, int] = {}

    def train(self, method: Method, step_count: int, port: int) -> tuple[float, float]:
        """Trains on; returns the monotonic times of start and end, set-up left out. `port` is free on host 0."""
        trainer = self._connections.trainer(method, port, lambda: self._build(method))
        start = time.monotonic()
        for _ in range(step_count):
            self._step(trainer, self._step_counts[method.name])
            self._step_counts[method.name] += 1
        trainer.settle()  # what an overlapped method has left under way is part of its time
        return start, time.monotonic()

    @torch.no_grad()
    def accuracy(self, method: Method) -> float | None:
        """On the test set; rank 0's answer stands for all replicas, which are equal."""
        if self._rank != 0:
            return None
        images = self._data.test_images[: self._args.test_images]
        answers = self._models[method.name](images).argmax(1)
        return float((answers == self._data.test_labels[: len(images)]).float().mean())

    def close(self) -> None:
        self._connections.close()

    def _step(self, trainer: Trainer, step: int) -> None:
        images, labels = self._batch(step)
        trainer.optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(trainer.module(images), labels).backward()
        trainer.optimizer.step()

    def _batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's `batch` rows of the step's global batch; epochs are shuffled alike on all ranks."""
        count, size = len(self._data.train_labels), self._args.batch
        epoch, index = divmod(step, count // (size * self._args.hosts))
        order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
        first = (index * self._args.hosts + self._rank) * size
        rows = order[first : first + size]
        return self._data.train_images[rows], self._data.train_labels[rows]

    def _build(self, method: Method) -> Bare:
        torch.manual_seed(self._args.seed)
        width, pixels = self._args.hidden, self._data.train_images[0].numel()
        hidden = [nn.Linear(pixels, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        model = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=self._args.lr, momentum=0.9, fused=True)
        self._models[method.name], self._step_counts[method.name] = model, 0
        return Bare(model, optimizer, [name for name, weight in model.named_parameters() if weight.dim() == 2])


def race(args: argparse.Namespace, fleet: Fleet, console: Console) -> list[Progress]:
    """Trains all methods in turns until each has reached the target or its last step."""
    runs = [Progress(method.name) for method in parse_methods(args.methods) if method.library != "none"]
    for _ in range(0, args.max_steps, args.segment):
        racing = [run for run in runs if run.seconds_to_target is None]
        for run in racing:
            method = METHODS[run.method]
            limit = TIMEOUT_S * args.segment
            times = fleet.call_same("train", method, args.segment, free_port(), timeout_seconds=limit)
            accuracy = fleet.call_same("accuracy", method, timeout_seconds=TIMEOUT_S)[0]
            before, steps, _ = run.points[-1] if run.points else (0.0, 0, 0.0)
            seconds = before + max(end for _, end in times) - min(start for start, _ in times)
            run.points.append((seconds, steps + args.segment, accuracy))
            if accuracy >= args.target:
                run.seconds_to_target = seconds
            console.print(f"{run.method:<18} step {steps + args.segment:>5}  {seconds:8.2f} s  {accuracy:.4f}")
    return runs


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--link", default="100mbit", help="rate of every port; none: loopback, unshaped")
    parser.add_argument("--methods", default="poseidon,ddp", help=", ".join(METHODS))
    parser.add_argument("--dataset", default="auto", choices=["auto", "fashion-mnist", "digits"])
    parser.add_argument("--hidden", type=int, default=2048, help="width of the two hidden layers")
    parser.add_argument("--batch", type=int, default=32, help="examples per worker and step")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--target", type=float, default=0.8, help="test accuracy to reach")
    parser.add_argument("--segment", type=int, default=10, help="steps between two evaluations")
    parser.add_argument("--max-steps", type=int, default=400, help="steps after which a method gives up")
    parser.add_argument("--test-images", type=int, default=5000, help="how many of the test set to evaluate on")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print JSON to standard output")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    console = Console(stderr=args.json, highlight=False)
    torch.set_num_threads(1)  # before any work: the workers are forked, and threads do not survive that
    data = load(args.dataset)
    link = None if args.link == "none" else args.link
    with hosts_on(args.hosts, link) as (places, tcp_copy):
        port = free_port()
        with start_fleet(places, lambda rank: ConvergenceHost(args, data, places, rank, port)) as fleet:
            runs = race(args, fleet, console)
            fleet.call_same("close", timeout_seconds=TIMEOUT_S)
    for run in runs:
        reached = "not reached" if run.seconds_to_target is None else f"{run.seconds_to_target:.2f} s"
        console.print(f"{run.method}: {reached} to test accuracy {args.target} on {data.name}")
    if args.json:
        document = {"dataset": data.name, "link": link, "tcp_copy_bits_per_second": tcp_copy}
        print(json.dumps({**vars(args), **document, "methods": [asdict(run) for run in runs]}, indent=2))


if __name__ == "__main__":
    main()
