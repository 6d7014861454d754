"""Predicts a training step: plans it as training does, and simulates it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from poseidon.adapter.choice.decision import best_schemes
from poseidon.adapter.threshold_search import CANDIDATES
from poseidon.errors import InvalidArgument
from poseidon.models import ModelTable
from poseidon.options import BY_NAME
from poseidon.planner.classes import ClassStep
from poseidon.planner.clock import BACKWARD, Activity
from poseidon.planner.cluster import ClusterSpec
from poseidon.planner.coded import AS_THEY_ARE, coded_shares, codes
from poseidon.planner.compute import Durations
from poseidon.planner.layers import Exchange
from poseidon.planner.load import Load, carriers, make_load
from poseidon.planner.messages import MessageStep
from poseidon.planner.workload import Workload, is_known, limits_by_layer

MOST_MESSAGE_WORKERS = 64
_MOST_CHOICES = 1000


@dataclass(frozen=True)
class Prediction:
    """A predicted step. Seconds, and bytes of one host's port in one direction with Poseidon's headers.

    A step lasts from the begin of a backward pass to that of the next one. `completed_s` has the time in it at which
    each load's mean is there, and `exposed_s` how long the accelerator waits for it. `ran` is what accelerator and
    processor do. `busy_s`: how long the busiest port, uplink or memory carries.
    """

    table: ModelTable
    cluster: ClusterSpec
    exchange: Exchange
    loads: tuple[Load, ...]
    step_s: float
    busy_s: float
    completed_s: tuple[float, ...]
    exposed_s: tuple[float, ...]
    ran: tuple[Activity, ...]

    @property
    def last(self) -> Activity:
        """What the step ends with; `chain()` of it says why it took so long."""
        return self.ran[-1]

    @property
    def efficiency(self) -> float:
        """The step of one worker alone over this step."""
        return self.table.iteration_seconds / self.step_s

    @property
    def speedup(self) -> float:
        """How many times as many samples as one worker alone."""
        return self.cluster.workers * self.efficiency

    @property
    def samples_per_s(self) -> float:
        """The samples per second of all workers."""
        return self.cluster.workers * self.table.batch / self.step_s

    @property
    def port_bytes(self) -> float:
        """What the busiest port sends plus receives in a step."""
        one_way = sum(load.push_bytes + load.result_bytes for load in self.loads)
        return one_way if self.cluster.servers else 2 * one_way

    @property
    def ready_s(self) -> dict[int, float]:
        """When each layer's backward pass ended, by its place."""
        return {work.of: work.end_s for work in self.ran if work.what == BACKWARD}

    def to_json(self) -> dict[str, Any]:
        """The figures as plain data."""
        return {
            "model": self.table.name,
            "cluster": asdict(self.cluster),
            "step_s": self.step_s,
            "compute_s": self.table.iteration_seconds,
            "speedup": self.speedup,
            "samples_per_s": self.samples_per_s,
            "efficiency": self.efficiency,
            "busy_s": self.busy_s,
            "port_bytes": self.port_bytes,
            "layers": [
                {"name": load.unit.name, "scheme": load.scheme, "completed_s": completed_s, "exposed_s": exposed_s}
                for load, completed_s, exposed_s in zip(self.loads, self.completed_s, self.exposed_s, strict=True)
            ],
        }


class Planner:
    """The plan of one model on one cluster. It predicts steps at any rate of the ports without planning again."""

    def __init__(self, table: ModelTable, cluster: ClusterSpec, exchange: Exchange) -> None:
        """Raises InvalidArgument for a scheme or a wire format that no prediction knows."""
        _check(exchange)
        self.table, self.cluster, self.exchange = table, cluster, exchange
        self._work = Workload(table, cluster, exchange) if cluster.workers > 1 else None
        self._made: dict[tuple[str | float, tuple[str, ...], bool], tuple[Load, ...]] = {}

    def predict(self, cluster: ClusterSpec | None = None, update_s: float = 0.0) -> Prediction:
        """The step by classes of equal workers: all are as slow as the slowest, for which they would wait anyway.

        `update_s`: what the update of all parameters takes on a worker. `cluster` may differ from this planner's in
        rates, because plans do not depend on them.
        """
        cluster = self.cluster if cluster is None else cluster
        found = [self._simulate(cluster, loads, update_s) for loads in self._candidates(cluster)]
        return min(found, key=lambda prediction: prediction.step_s)

    def predict_best(self) -> Prediction:
        """The fastest step of all choices of schemes, each of which is simulated: the bound of what `predict` can find.

        For models with few layers that have a choice. Raises InvalidArgument for those with many.
        """
        schemes = [unit.schemes for unit in self._work.units] if self._work is not None else []
        if math.prod(map(len, schemes)) > _MOST_CHOICES:
            raise InvalidArgument(f"{self.table.name} has more than {_MOST_CHOICES} choices of schemes: use predict")
        found = [
            self._simulate(self.cluster, self._loads(self.cluster, self._threshold, choice), 0.0)
            for choice in product(*schemes)
        ]
        return min(found, key=lambda prediction: prediction.step_s)

    def predict_as(self, schemes: Mapping[str, str]) -> Prediction:
        """The step in which layers have these schemes, by name, as far as a prediction knows them there."""
        units = [] if self._work is None else self._work.units
        chosen = [(schemes.get(unit.members[0].name, ""), unit.schemes) for unit in units]
        taken = tuple(name if name in known else known[0] for name, known in chosen)
        return self._simulate(self.cluster, self._loads(self.cluster, self._threshold, taken) if units else (), 0.0)

    @property
    def has_messages(self) -> bool:
        """Whether `predict_by_message` knows the cluster."""
        cluster = self.cluster
        alone = cluster.workers_per_host == 1 and not cluster.servers and not cluster.rack_labels
        return alone and cluster.workers <= MOST_MESSAGE_WORKERS

    def scheme_limits(self) -> dict[str, list[tuple[str, int]]]:
        """For each layer with a choice: the schemes with the fewest bytes, and up to how many workers each is it."""
        return {} if self._work is None else limits_by_layer(self._work)

    def predict_by_message(
        self,
        update_s: float = 0.0,
        chosen: Prediction | None = None,
        hosts: Sequence[str] = (),
        slow: ModelTable | None = None,
        port_times: Sequence[float] = (),
    ) -> Prediction:
        """The step, with every message of every worker. The schemes are those of `chosen`, or of `predict`.

        `hosts` are names of the hosts, the slowest first; without them they have numbers. `slow` has the times of the
        slowest worker; without it they are those of the others times the cluster's `slowest`. `port_times`: how many
        times as fast as the cluster's ports each host's is. Raises InvalidArgument for clusters for which only classes
        are known.
        """
        if not self.has_messages:
            raise InvalidArgument(
                f"{self.cluster} can be simulated by classes only: by message there may be {MOST_MESSAGE_WORKERS} "
                "workers at most, no dedicated servers, and no workers that add up by host or rack"
            )
        chosen = chosen or self.predict(update_s=update_s)
        names = hosts or [f"host {number}" for number in range(self.cluster.hosts)]
        usual = self._durations(self.cluster, update_s)
        of_slow = usual.slowed(self.cluster.slowest) if slow is None else self._durations(self.cluster, update_s, slow)
        durations = [of_slow, *[usual] * (self.cluster.workers - 1)]
        rates = [self.cluster.payload_bytes_per_s * times for times in port_times or [1.0] * self.cluster.hosts]
        step = MessageStep(chosen.loads, durations, self.cluster, self.exchange, names, rates)
        step.run()
        slowest = max(step.workers, key=lambda worker: worker.end_s)
        return replace(
            chosen,
            step_s=slowest.end_s,
            busy_s=step.busiest_s,
            completed_s=tuple(slowest.completed_s),
            exposed_s=tuple(slowest.exposed_s),
            ran=tuple(slowest.ran),
        )

    @cached_property
    def _threshold(self) -> str | float:
        """The threshold of priorities. With "auto" training searches it, where layers are waited for one by one."""
        if self.exchange.threshold != "auto":
            return self.exchange.threshold
        if self._work is None or not self.exchange.overlap:
            return CANDIDATES[0]
        first = self._first_schemes(self._work)

        def step_s(threshold: float) -> float:
            return self._simulate(self.cluster, self._loads(self.cluster, threshold, first), 0.0).step_s

        return min(CANDIDATES, key=step_s)

    def _first_schemes(self, work: Workload) -> tuple[str, ...]:
        """The schemes that training begins with."""
        return tuple(unit.schemes[0] for unit in work.units)

    def _candidates(self, cluster: ClusterSpec) -> list[tuple[Load, ...]]:
        """The loads by the schemes that training begins with, and by those that it may change to."""
        work = self._work
        if work is None:
            return [()]
        choices = [self._first_schemes(work)]
        if self.exchange.by_time and any(len(unit.schemes) > 1 for unit in work.units):
            model = work.model(cluster, _products_per_s(self.table, cluster))
            choices += [best_schemes(model), tuple(_dense(unit.schemes) for unit in work.units)]
        return [self._loads(cluster, self._threshold, schemes) for schemes in dict.fromkeys(choices)]

    def _loads(self, cluster: ClusterSpec, threshold: str | float, schemes: tuple[str, ...]) -> tuple[Load, ...]:
        """The loads of all units, which are made once. Whether they are coded depends on the rate of `cluster`."""
        work, coded = self._work, codes(self.exchange, cluster)
        key = (threshold, schemes, coded)
        if work is not None and key not in self._made:
            passed, classes = carriers(self.cluster), work.classes(threshold)
            self._made[key] = tuple(
                make_load(work, passed, unit, scheme, level, coded_shares(work, unit, scheme) if coded else AS_THEY_ARE)
                for unit, scheme, level in zip(work.units, schemes, classes, strict=True)
            )
        return self._made[key]

    def _simulate(self, cluster: ClusterSpec, loads: Sequence[Load], update_s: float) -> Prediction:
        durations = self._durations(cluster, update_s).slowed(cluster.slowest)
        step = ClassStep(loads, durations, cluster, self.exchange)
        step.run()
        return Prediction(
            self.table,
            cluster,
            self.exchange,
            tuple(loads),
            step.worker.end_s,
            max((carrier.busy_s for carrier in step.carriers.values()), default=0.0),
            tuple(step.worker.completed_s),
            tuple(step.worker.exposed_s),
            tuple(step.worker.ran),
        )

    def _durations(self, cluster: ClusterSpec, update_s: float, table: ModelTable | None = None) -> Durations:
        table = table or self.table
        both, parameter_count = table.durations(table.iteration_seconds), table.parameter_count
        return Durations(
            [forward for forward, _ in both],
            [backward for _, backward in both],
            [update_s * layer.parameter_count / parameter_count for layer in table.layers],
            _products_per_s(table, cluster),
            cluster.products_per_s is None,
        )


def _products_per_s(table: ModelTable, cluster: ClusterSpec) -> float:
    """The multiply-adds per second of products of factors: an accelerator makes them as fast as those of layers."""
    if cluster.products_per_s is not None:
        return cluster.products_per_s
    return table.flops * table.batch / table.forward_share / 2 / table.iteration_seconds


def _dense(schemes: Sequence[str]) -> str:
    return "ps" if "ps" in schemes else schemes[0]


def _check(exchange: Exchange) -> None:
    if not is_known(exchange.scheme):
        raise InvalidArgument(
            f"no prediction knows the scheme {exchange.scheme!r}: give auto, ps, sfb or sharded_factors"
        )
    BY_NAME["wire"].read(exchange.wire, "wire")
