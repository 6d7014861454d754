"""What the machines of `poseidon bench cluster` are told, and what they say in the end."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

MARK = "poseidon bench cluster: "
"""The beginning of a line that is for the command and not for the user."""

MODELS = ("ResNet-50", "BERT-base", "GPT-2", "VGG19", "Llama-1B LoRA")
METHODS = ("none", "poseidon", "overlap", "ddp", "ddp-fp16", "ddp-bf16")


@dataclass(frozen=True)
class Task:
    """What to measure. `scale` divides the dimensions of weights. Computation takes `slower` times what the device
    takes, times the scale."""

    models: tuple[str, ...] = MODELS
    methods: tuple[str, ...] = METHODS
    scale: int = 1
    slower: float = 1.0
    device: str = "titan-x"
    step_count: int = 3
    round_count: int = 2
    timeout_seconds: float = 300.0

    def to_text(self) -> str:
        """As an argument of a program."""
        return json.dumps(asdict(self))

    @staticmethod
    def of_text(text: str) -> Task:
        """The task that `to_text` has written."""
        given: dict[str, Any] = json.loads(text)
        return Task(**{**given, "models": tuple(given["models"]), "methods": tuple(given["methods"])})


@dataclass(frozen=True)
class Network:
    """What the machines' ports do, by their numbers.

    `rates`: bytes of payload per second from each machine (row) to each other one, while it receives as much as it can;
    0 on the diagonal. `round_trips_s`: the least of some between each two. `exchange_bytes_per_s`: what each port sends
    while all machines add up one large array, as numbers are without coding. `multiply_adds_per_s`: of the slowest
    processor.
    """

    rates: list[list[float]]
    round_trips_s: list[list[float]]
    exchange_bytes_per_s: float
    multiply_adds_per_s: float
    mtu: int

    @property
    def port_bytes_per_s(self) -> float:
        """Of the slowest port, by its best pair."""
        return min(max(row) for row in self.rates)

    @property
    def latency_s(self) -> float:
        """Half of a usual round trip."""
        trips = sorted(trip for row in self.round_trips_s for trip in row if trip)
        return trips[len(trips) // 2] / 2 if trips else 0.0


@dataclass(frozen=True)
class Step:
    """A model's step with one method. `step_s` is the median; `seconds` has every measured step."""

    model: str
    method: str
    step_s: float
    seconds: list[float]
    coded_share: float | None
