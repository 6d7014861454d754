"""What the suite measures: its groups, each of which is one run of `poseidon bench train`, and how long each takes.

A group stands for a model on hosts with ports of 1, 10 or 25 GbE. Dimensions of weights are divided by `SCALE`, so
bytes and rate by its square. Two cores replay all hosts. So time is stretched: computation and the ports' rate alike,
which changes no ratio, until a step takes long enough and all ports together carry what these cores can. Where they
can carry more, a step that computes long is shortened in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

from poseidon.bench.training.methods import METHODS as KNOWN_METHODS
from poseidon.bench.training.methods import Method, methods_named
from poseidon.bench.training.results import TrainConfig
from poseidon.errors import InvalidArgument
from poseidon.models import ModelTable, model_table, scaled

MODELS = ("VGG19", "ResNet-50", "BERT-base", "GPT-2", "ViT-B/16", "Llama-134M", "Llama-1B LoRA", "DLRM")
RATES = (1.0, 10.0, 25.0)  # Gb/s
MORE_RATES = (40.0,)  # which are measured if they are asked for
HOSTS = (2, 4, 8)
METHODS = (
    *("poseidon", "overlap", "server", "poseidon-bf16", "server-bf16"),
    *("ddp", "ddp-fp16", "ddp-bf16", "ddp-powersgd"),
)
PEER = "ddp"  # to which all are compared
HOOK = "ddp-bf16"  # to which those are compared, too, that send bf16
SCALE = 8
STEPS = 2  # measured ones of a round
_GBIT = 1e9
_MOST_COMPUTE_S = 1.0
_LEAST_STEP_S, _LONG_S = 0.2, 2.0  # of DDP; above the second there is one round and not two
_LONGEST_STEP_S = 5.0  # of a step that exchanges little
_MOST_BITS_PER_S = 1e9  # of all ports together, on cores of the usual speed
_WARM_UPS = 6  # about, of one method in a round, with those that try chunk sizes and schemes
_STARTS_S = 15.0  # of a group: hosts, and the plain copy
_START_S = 7.0  # of a method: processes and connections
# As users run: the system's TCP, and switches that are plain queues.
_TESTBED = {"priorities": 2, "honour_dscp": False, "congestion": "system"}


@dataclass(frozen=True)
class Group:
    """One model on one cluster, by all methods in turn. `slower`: on cores so many times slower than the usual ones."""

    model: str
    gbit_per_s: float
    hosts: int
    slower: float = field(default=1.0, compare=False)

    @property
    def table(self) -> ModelTable:
        """The whole network, which a Titan X computes."""
        return model_table(self.model)

    @property
    def stretch(self) -> float:
        """How many times slower than the hardware it stands for everything is. Below 1 it is faster."""
        step_s = self._step_s(KNOWN_METHODS[PEER])
        of_all_ports = self.slower * self.hosts / _MOST_BITS_PER_S
        by_rate = min(of_all_ports * self._scaled_rate, _LONGEST_STEP_S / step_s)
        by_load = of_all_ports * self._carried_bits(KNOWN_METHODS[PEER]) / step_s
        short = max(_LEAST_STEP_S / step_s, min(1.0, _MOST_COMPUTE_S / self.table.iteration_seconds))
        return max(by_rate, by_load, self.slower * short)

    @property
    def bits_per_second(self) -> float:
        """The rate of a replayed port."""
        return self._scaled_rate / self.stretch

    def config(self, methods: Sequence[Method]) -> TrainConfig:
        """The run."""
        return TrainConfig(
            model=self.model,
            host_count=self.hosts,
            link=f"{self.bits_per_second / 1e6:.4g}mbit",
            scale=SCALE,
            compute_seconds=self.table.iteration_seconds * self.stretch,
            methods=tuple(methods),
            step_count=STEPS,
            repeat_count=self._rounds,
            testbed=dict(_TESTBED),
        )

    @property
    def _scaled_rate(self) -> float:
        return self.gbit_per_s * _GBIT / SCALE**2

    @property
    def _rounds(self) -> int:
        return 1 if self._step_s(KNOWN_METHODS[PEER]) * self.stretch > _LONG_S else 2

    def _step_s(self, method: Method) -> float:
        """About what a step takes before it is stretched."""
        return max(self.table.iteration_seconds, self._carried_bits(method) / self._scaled_rate)

    def _carried_bits(self, method: Method) -> float:
        """What a replayed port carries in a step, each way."""
        return method.scaled(SCALE).closed_form_bytes(scaled(self.table, SCALE), self.hosts) / 2 * 8

    def seconds(self, methods: Sequence[Method]) -> float:
        """About how long it takes to run."""
        steps = (_WARM_UPS + STEPS) * self._rounds
        return _STARTS_S + _START_S * len(methods) + steps * self.stretch * sum(map(self._step_s, methods))

    def __str__(self) -> str:
        return f"{self.model}, {self.hosts} hosts, {self.gbit_per_s:g} GbE"


def groups(models: str, rates: str, hosts: str, slower: float = 1.0) -> list[Group]:
    """Those of comma-separated lists. Raises InvalidArgument for what the suite does not know."""
    chosen = _chosen("models", models, MODELS)
    found_rates = [float(rate) for rate in _chosen("rates", rates, [f"{rate:g}" for rate in (*RATES, *MORE_RATES)])]
    counts = [int(count) for count in _chosen("hosts", hosts, [str(count) for count in HOSTS])]
    return [Group(model, rate, count, slower) for count, model, rate in product(counts, chosen, found_rates)]


def methods_of(text: str) -> list[Method]:
    """Those of a comma-separated list, with "none", which efficiency needs, and the peer."""
    return methods_named([*_chosen("methods", text, list(KNOWN_METHODS)), PEER])


def _chosen(what: str, text: str, known: Sequence[str]) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in known:
            raise InvalidArgument(f"the suite has no {what} {name!r}: it has {', '.join(known)}")
    if not names:
        raise InvalidArgument(f"no {what} are given: choose from {', '.join(known)}")
    return names
