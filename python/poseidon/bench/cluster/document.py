"""What `poseidon bench cluster` has found, as a file to share, and what the planner predicts of the same steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any

from poseidon.bench.cluster.task import Network, Step, Task
from poseidon.bench.training.methods import METHODS, exchange_of
from poseidon.errors import InvalidArgument
from poseidon.models import ModelTable, model_table, scaled
from poseidon.planner import ClusterSpec, Planner
from poseidon.planner.cluster import CLUSTER_KEY
from poseidon.planner.ddp import ddp_step_s
from poseidon.rates import format_rate
from poseidon.version import VERSION

_PROBE = 1e9
_LEAST_RATE = 1e6


@dataclass(frozen=True)
class Compared:
    """A measured step beside the predicted one. `over_ddp`: DDP's measured step over this one; None without DDP."""

    step: Step
    predicted_s: float
    efficiency: float
    over_ddp: float | None

    @property
    def error(self) -> float:
        """By which fraction the prediction is too long."""
        return self.predicted_s / self.step.step_s - 1

    @property
    def is_own(self) -> bool:
        """Whether it is a method of Poseidon."""
        return METHODS[self.step.method].library == "poseidon"


@dataclass(frozen=True)
class Found:
    """All that was found. `cores`: of the first machine."""

    task: Task
    network: Network
    cores: int
    steps: Sequence[Step]

    @staticmethod
    def of(task: Task, told: Iterable[Mapping[str, Any]]) -> Found:
        """What the first machine has told, object by object. Raises InvalidArgument if the network is not among it."""
        merged: dict[str, Any] = {}
        steps: list[Step] = []
        for one in told:
            merged.update(one)
            steps += [Step(**step) for step in one.get("steps", [])]
        if "network" not in merged:
            raise InvalidArgument("the machines have measured nothing: see what they have printed")
        return Found(task, Network(**merged["network"]), merged["cores"], steps)

    @cached_property
    def cluster(self) -> ClusterSpec:
        """The cluster that the planner knows: equal hosts, whose ports carry what plain TCP gets through them."""
        network = self.network
        probe = ClusterSpec(len(network.rates), _PROBE, mtu=network.mtu)
        rate = network.port_bytes_per_s * _PROBE / probe.payload_bytes_per_s
        return replace(probe, bits_per_second=max(_LEAST_RATE, rate), latency_s=network.latency_s)

    @cached_property
    def compared(self) -> list[Compared]:
        """Each step with an exchange beside what the planner predicts."""
        measured = {(step.model, step.method): step for step in self.steps}
        found = []
        for step in self.steps:
            none, ddp = measured.get((step.model, "none")), measured.get((step.model, "ddp"))
            if none is None or step.method == "none":
                continue
            over_ddp = None if ddp is None else ddp.step_s / step.step_s
            found.append(Compared(step, self._predicted(step, none.step_s), none.step_s / step.step_s, over_ddp))
        return found

    def _predicted(self, step: Step, none_s: float) -> float:
        task, method = self.task, METHODS[step.method]
        table = self._table(step.model)
        compute_s = table.iteration_seconds
        if method.library == "torch":
            number_bytes = None if method.wire == "fp32" else 2
            return ddp_step_s(replace(table, iteration_seconds=none_s), self.cluster, number_bytes, task.scale)
        exchange = replace(exchange_of(method, task.scale), coding="on" if task.scale > 1 else "auto")
        planner = Planner(table, self.cluster, exchange)
        update_s = max(0.0, none_s - compute_s)
        found = planner.predict_by_message(update_s) if planner.has_messages else planner.predict(update_s=update_s)
        return found.step_s

    def _table(self, model: str) -> ModelTable:
        table = scaled(model_table(model, self.task.device), self.task.scale)
        return replace(table, iteration_seconds=table.iteration_seconds * self.task.slower)

    def to_json(self) -> dict[str, Any]:
        """As a file to share. It has no names and addresses."""
        return {
            CLUSTER_KEY: VERSION,
            "cluster": {
                "hosts": self.cluster.hosts,
                "link": format_rate(self.cluster.bits_per_second),
                "latency_ms": round(self.cluster.latency_s * 1e3, 4),
                "mtu": self.cluster.mtu,
            },
            "cores": self.cores,
            "task": asdict(self.task),
            "network": asdict(self.network),
            "steps": [
                {
                    **asdict(one.step),
                    "predicted_s": one.predicted_s,
                    "error": one.error,
                    "efficiency": one.efficiency,
                    "over_ddp": one.over_ddp,
                }
                for one in self.compared
            ],
            "without_exchange": {step.model: step.step_s for step in self.steps if step.method == "none"},
        }

    def words(self) -> Iterator[str]:
        """What was found, in sentences."""
        network = self.network
        port = network.port_bytes_per_s
        yield (
            f"{len(network.rates)} machines: the slowest port carries {port * 8e-9:.2f} Gb/s in both directions at "
            f"once, and a message takes {network.latency_s * 1e3:.2f} ms. While all add up one large array, each port "
            f"sends {network.exchange_bytes_per_s / port:.2f} of that, counted without coding."
        )
        for whose, own in (("Poseidon", True), ("torch's DDP", False)):
            errors = sorted(abs(one.error) for one in self.compared if one.is_own == own)
            if errors:
                yield (
                    f"The planner's steps of {whose} are off by {median(errors):.1%} in the middle and "
                    f"{errors[-1]:.1%} at worst."
                )
