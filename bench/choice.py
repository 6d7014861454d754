"""The choice of schemes by time against the best choice that trying finds.

Of the five largest layers with a choice, combinations of their schemes are tried: one scheme for all, and the others
or a sample of them drawn from the seed. Then the library chooses, from the schemes with the fewest bytes on. At last
the best combination and the library's take turns, and the ratio of their median steps is printed. A step is that of
the slowest worker.

    python bench/choice.py --models mlp,AlexNet,VGG19 --links 100mbit,300mbit,1gbit       # root and iproute2
    python bench/choice.py --models mlp --links 300mbit --sample 8                        # one cell, a minute
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
from torch import nn

import poseidon.torch as poseidon
from poseidon.bench.hosts.fleet import Fleet, Place, hosts_on, start_fleet
from poseidon.bench.training.replay import ReplayModel, input_token
from poseidon.launch import free_port
from poseidon.models import model_table
from poseidon.models.table import scaled

TIMEOUT_S = 300.0
LARGEST = 5
WARM_UP_STEPS = 1  # after each change of schemes
QUIET_STEPS = 24  # without a change: the library has decided
MOST_STEPS = 120
Combination = tuple[str, ...]


def perceptron(width: int, depth: int) -> nn.Module:
    """Fully connected layers with real products, so that a scheme's products compete with them for the processor."""
    layers = [nn.Linear(width, width) for _ in range(depth)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))


class Host:
    """One worker."""

    def __init__(self, args: argparse.Namespace, name: str, places: Sequence[Place], rank: int, port: int) -> None:
        torch.set_num_threads(1)  # the hosts of a testbed share this machine's cores
        poseidon.init(
            rank=rank,
            world_size=len(places),
            master_addr=places[0].address,
            master_port=port,
            timeout=TIMEOUT_S,
            compute_threads=1,
            transport="tcp",
        )
        torch.manual_seed(0)
        if name == "mlp":
            self._inputs, module = torch.randn(args.batch, args.width), perceptron(args.width, LARGEST)
        else:
            whole = model_table(name)
            table = scaled(whole, args.scale)
            self._inputs, module = input_token(), ReplayModel(table, args.compute, rank=rank, unscaled=whole)
        self._model = poseidon.DistributedDataParallel(module, init_sync=False)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-6)
        self._step = 0

    def run(self, steps: int) -> list[float]:
        """Makes steps and returns the times at which they ended, and before them that of the beginning."""
        ends = [time.monotonic()]
        for _ in range(steps):
            self._optimizer.zero_grad(set_to_none=True)
            self._model(self._inputs).sum().backward()
            self._optimizer.step()
            self._step += 1
            ends.append(time.monotonic())
        return ends

    def layers(self) -> dict[str, tuple[int, tuple[str, ...]]]:
        """The mean K and the schemes of the largest layers that have a choice, after a first step."""
        assert self._model.synchronizer is not None
        open_layers = self._model.synchronizer.layers.choices.open_layers
        rows = {row.layer: row for row in self._model.plan()}
        largest = sorted(open_layers, key=lambda name: -rows[name].dense_bytes)[:LARGEST]
        return {name: (rows[name].factor_count or 0, tuple(open_layers[name])) for name in largest}

    def choose(self, choices: Sequence[tuple[str, str, int]]) -> None:
        """Makes these choices (layer, scheme, K), and no others, from the next step on."""
        log = [
            {"step": self._step, "layer": layer, "scheme": scheme, "factor_count": count}
            for layer, scheme, count in choices
        ]
        self._model.replay_choices(log, self._step)

    def chosen(self) -> tuple[int, dict[str, str], list[str]]:
        """How many choices have been made since `choose`, what every layer takes now, and the reasons."""
        log = self._model.choices()
        taken = {row.layer: row.scheme for row in self._model.plan()}
        return len(log), taken, list(dict.fromkeys(entry["reason"] for entry in log))

    def close(self) -> None:
        """Ends the job."""
        del self._model
        poseidon.shutdown()


@dataclass(frozen=True)
class Cell:
    """One model on links of one rate."""

    model: str
    link: str
    layers: list[str]
    tried: dict[str, float]  # by combination: ms per step
    best: str
    auto: str
    best_ms: float  # when the two take turns
    auto_ms: float
    reasons: list[str]

    @property
    def ratio(self) -> float:
        """The library's step over the best one that was tried."""
        return self.auto_ms / self.best_ms


class Bench:
    """The calls of one cell."""

    def __init__(self, args: argparse.Namespace, fleet: Fleet) -> None:
        self._args, self._fleet = args, fleet

    def run(self, model: str, link: str) -> Cell:
        """Tries, lets the library choose, and compares."""
        self._steps(2)
        layers: Mapping[str, tuple[int, tuple[str, ...]]] = self._call("layers")[0]
        sample = self._sample([schemes for _, schemes in layers.values()])
        tried: dict[Combination, list[float]] = {combination: [] for combination in sample}
        for _ in range(self._args.rounds):
            for combination in sample:
                tried[combination] += self._measure(layers, combination)
        medians = {combination: median(durations) for combination, durations in tried.items()}
        best = min(medians, key=medians.__getitem__)
        auto, reasons = self._let_it_choose(layers)
        turns: dict[Combination, list[float]] = {best: [], auto: []}
        for _ in range(self._args.turns):
            for combination in turns:
                turns[combination] += self._measure(layers, combination)
        return Cell(
            model,
            link,
            list(layers),
            {"/".join(one): 1e3 * seconds for one, seconds in medians.items()},
            "/".join(best),
            "/".join(auto),
            1e3 * median(turns[best]),
            1e3 * median(turns[auto]),
            reasons,
        )

    def _let_it_choose(self, layers: Mapping[str, Any]) -> tuple[Combination, list[str]]:
        self._call("choose", [])
        count, quiet, made = 0, 0, 0
        while quiet < QUIET_STEPS and made < MOST_STEPS:
            self._steps(8)
            made += 8
            now, taken, reasons = self._call("chosen")[0]
            quiet = quiet + 8 if now == count else 0
            count = now
        return tuple(taken[layer] for layer in layers), reasons

    def _sample(self, schemes: Sequence[Sequence[str]]) -> list[Combination]:
        """All combinations, or one scheme for all layers and a sample of the others."""
        everything = list(itertools.product(*schemes))
        alike = [one for one in everything if len(set(one)) == 1]
        others = [one for one in everything if one not in alike]
        if len(others) > self._args.sample:
            others = random.Random(self._args.seed).sample(others, self._args.sample)
        return alike + others

    def _measure(self, layers: Mapping[str, tuple[int, Any]], combination: Combination) -> list[float]:
        choices = [
            (layer, scheme, count) for (layer, (count, _)), scheme in zip(layers.items(), combination, strict=True)
        ]
        self._call("choose", choices)
        return self._steps(WARM_UP_STEPS + self._args.steps)[WARM_UP_STEPS:]

    def _steps(self, count: int) -> list[float]:
        ends = self._call("run", count)
        latest = [max(times) for times in zip(*ends, strict=True)]
        return [end - start for start, end in itertools.pairwise(latest)]

    def _call(self, name: str, *arguments: Any) -> list[Any]:
        return self._fleet.call_same(name, *arguments, timeout_seconds=TIMEOUT_S)


def measure(args: argparse.Namespace, model: str, link: str) -> Cell:
    """One cell, in a job of its own."""
    with hosts_on(args.hosts, None if link == "none" else link) as (places, _):
        port = free_port()
        with start_fleet(places, lambda rank: Host(args, model, places, rank, port)) as fleet:
            cell = Bench(args, fleet).run(model, link)
            fleet.call_same("close", timeout_seconds=TIMEOUT_S)
    return cell


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="mlp,AlexNet,VGG19", help="mlp, or tables of poseidon.models")
    parser.add_argument("--links", default="100mbit,300mbit,1gbit", help="rates of every port; none: loopback")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--width", type=int, default=768, help="of the layers of mlp")
    parser.add_argument("--batch", type=int, default=96, help="K of the layers of mlp")
    parser.add_argument("--scale", type=int, default=8, help="divisor of a table's dimensions and batch")
    parser.add_argument("--compute", type=float, default=0.3, help="seconds of a table's step without exchange")
    parser.add_argument("--sample", type=int, default=12, help="combinations that are tried beside equal ones, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2, help="of all combinations")
    parser.add_argument("--turns", type=int, default=6, help="of the best combination and the library's")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each turn")
    parser.add_argument("--json", action="store_true", help="print JSON to standard output")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)  # before any work: the workers are forked, and threads do not survive that
    for model, link in itertools.product(args.models.split(","), args.links.split(",")):
        cell = measure(args, model, link)
        if args.json:
            print(json.dumps({**asdict(cell), "ratio": cell.ratio}), flush=True)
            continue
        print(
            f"{cell.model:<10} {cell.link:>8}  best {cell.best_ms:8.1f} ms {cell.best}  auto {cell.auto_ms:8.1f} ms "
            f"{cell.auto}  ratio {cell.ratio:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
