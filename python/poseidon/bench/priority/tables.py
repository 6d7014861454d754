"""Geryon's Tables II and III and Figures 8 and 9, replayed: its models at its device's times on its ports' rates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from poseidon.bench.training.methods import METHODS, Method, parse_methods
from poseidon.bench.training.results import MethodResult, TrainConfig, TrainResult
from poseidon.bench.training.run import run_training
from poseidon.models import model_table
from poseidon.rates import format_rate

DEVICE = "k40"
PAPER_HOSTS = 8
PAPER_METHODS = ("vanilla", "slicing", "geryon")
# Scaling efficiency of 8 workers with PAPER_METHODS, by the ports' Gb/s and model.
PAPER_EFFICIENCIES = {
    10.0: {
        "AlexNet": (0.364, 0.802, 0.954),
        "VGG19": (0.269, 0.793, 0.946),
        "ResNet-50": (0.876, 0.900, 0.957),
        "YOLO": (0.209, 0.758, 0.915),
    },
    40.0: {
        "AlexNet": (0.794, 0.900, 0.951),
        "VGG19": (0.617, 0.853, 0.948),
        "ResNet-50": (0.941, 0.941, 0.961),
        "YOLO": (0.532, 0.842, 0.936),
    },
}
PAPER_MODELS = tuple(PAPER_EFFICIENCIES[10.0])

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class GridConfig:
    """What is measured: every model at every rate with every number of hosts.

    `gigabits_per_second` are the rates of the real ports that the testbed's ports stand for. `scale` divides the
    weights and the batch. `stretch` multiplies the compute time. A port of the testbed has rate / (scale² · stretch).
    `options` are more of `poseidon.init`, `testbed` has more arguments of `Testbed`.
    """

    models: tuple[str, ...] = PAPER_MODELS
    gigabits_per_second: tuple[float, ...] = tuple(PAPER_EFFICIENCIES)
    host_counts: tuple[int, ...] = (PAPER_HOSTS,)
    methods: tuple[Method, ...] = tuple(METHODS[name] for name in ("none", *PAPER_METHODS))
    scale: int = 4
    stretch: float = 4.0
    step_count: int = 3
    repeat_count: int = 2
    timeout_seconds: float = 300.0
    options: dict[str, Any] = field(default_factory=dict)
    testbed: dict[str, Any] = field(default_factory=dict)

    def link(self, gigabits_per_second: float) -> str:
        """Returns the rate of a testbed's port that stands for one of `gigabits_per_second`."""
        return format_rate(round(gigabits_per_second * 1e9 / (self.scale**2 * self.stretch)))

    def runs(self) -> Iterator[tuple[float, TrainConfig]]:
        """Every run with the real ports' Gb/s. A single host exchanges nothing, whatever the method."""
        for model, rate, host_count in product(self.models, self.gigabits_per_second, self.host_counts):
            yield (
                rate,
                TrainConfig(
                    model=model,
                    host_count=host_count,
                    link=self.link(rate),
                    scale=self.scale,
                    compute_seconds=model_table(model, DEVICE).iteration_seconds * self.stretch,
                    methods=self.methods if host_count > 1 else tuple(parse_methods("none")),
                    step_count=self.step_count,
                    repeat_count=self.repeat_count,
                    timeout_seconds=self.timeout_seconds,
                    options=self.options,
                    device=DEVICE,
                    testbed=self.testbed,
                ),
            )


@dataclass(frozen=True)
class GridRun:
    """One run of a grid. Its ports stand for real ones of `gigabits_per_second`."""

    gigabits_per_second: float
    result: TrainResult

    def paper_efficiency(self, entry: MethodResult) -> float | None:
        """What the paper measured with this method. None if it gives no figure."""
        efficiencies = PAPER_EFFICIENCIES.get(self.gigabits_per_second, {}).get(self.result.model)
        if efficiencies is None or self.result.hosts != PAPER_HOSTS or entry.method not in PAPER_METHODS:
            return None
        return efficiencies[PAPER_METHODS.index(entry.method)]


@dataclass(frozen=True)
class GridResult:
    """All runs of a grid."""

    runs: list[GridRun]

    def to_json(self) -> dict[str, Any]:
        """Returns the result as `json.dump` takes it."""
        documents = []
        for run in self.runs:
            document = {"gigabits_per_second": run.gigabits_per_second, **run.result.to_json()}
            for entry, result in zip(document["methods"], run.result.methods, strict=True):
                entry["paper_efficiency"] = run.paper_efficiency(result)
            documents.append(document)
        return {"runs": documents}


def run_grid(config: GridConfig, progress: Callable[[str], AbstractContextManager[Progress]]) -> GridResult:
    """Measures all runs of `config`. Needs root. `progress(name of a run)` shows its rounds. Raises PoseidonError."""
    finished = []
    for rate, run in list(config.runs()):  # all of them, so that what is wrong with one is told at once
        with progress(f"{run.model} ×{run.host_count} {rate:g} Gb/s") as show:
            finished.append(GridRun(rate, run_training(run, show)))
    return GridResult(finished)
