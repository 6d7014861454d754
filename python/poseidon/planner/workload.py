"""What a training step of a model exchanges: its units, with the schemes, chunks and costs that training gives them.

Everything is decided by the code that decides it in training: the plan by the core, the layers, their priorities and
their costs by `poseidon.adapter`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from poseidon import _core
from poseidon.adapter import cost
from poseidon.adapter.choice.measurement import demand
from poseidon.adapter.choice.prediction import Rates, StepModel, UnitWork
from poseidon.adapter.layer import SyncedLayer
from poseidon.adapter.priorities import Priorities
from poseidon.models import ModelTable
from poseidon.options import Settings
from poseidon.planner.cluster import MOST_WORKERS, ClusterSpec
from poseidon.planner.layers import Exchange, planned_layers
from poseidon.schemes import SCHEMES, takes_factors, takes_rows

_MOST_BYTES = 4  # a scheme with factors is not tried if it has so many times the fewest bytes


@dataclass(frozen=True)
class PlannedUnit:
    """One unit of the plan. `members` are its layers; `places` their places in the model's table; `facts` the core's
    view of it. `factor_count` is K of one worker. Of two units the one of the lower `level` goes first. `presence`: the
    part of the steps in which it is exchanged."""

    members: tuple[SyncedLayer, ...]
    places: tuple[int, ...]
    facts: _core.Unit
    factor_count: int
    level: int
    presence: float
    schemes: tuple[str, ...]  # those that it may take; first the one with the fewest bytes

    @property
    def name(self) -> str:
        """The layer's name, or the group's."""
        return self.facts.name

    @cached_property
    def chunk_bytes(self) -> list[tuple[int, float]]:
        """The server of each chunk, and its bytes on the way."""
        layer = self.members[0]
        share = layer.element_count and layer.terms.bytes_per_value / cost.element_bytes(layer)
        return [(chunk.server, chunk.size_bytes * share) for chunk in self.facts.chunks]


class Workload:
    """The units of one step of `table` on `cluster`, in the order in which backward finishes them."""

    def __init__(self, table: ModelTable, cluster: ClusterSpec, exchange: Exchange) -> None:
        """Raises InvalidArgument if the plan refuses a layer, and ValueError for an unknown wire format or scheme."""
        self.table, self.cluster, self.exchange = table, cluster, exchange
        self.core = cluster.core()
        self._planned = planned_layers(table, exchange)
        self.layers = [planned.layer for planned in self._planned]
        options = _core.Options(partition=exchange.partition, **exchange.sizes)
        asked = [layer.asked for layer in self.layers]
        plan = _core.make_plan(asked, self.core, options)
        found = zip(self.layers, plan.unit_of_layer, plan.terms, strict=True)
        for number, (layer, unit, terms) in enumerate(found):
            layer.place(number, (0, unit), terms, 0)
        planned = plan.layers  # each look at it copies the whole list
        self.units = [self._unit(planned, facts) for facts in plan.units]
        self.units.sort(key=lambda unit: -min(unit.places))

    def classes(self, threshold: str | float) -> list[int]:
        """The traffic class of each unit with this threshold, "coarse" or a number. Lower classes go first."""
        exchange = self.exchange
        options = {
            "priority_order": exchange.order,
            "priority_classes": exchange.classes,
            "priority_threshold": threshold,
        }
        priorities = Priorities(Settings(options), self.layers)
        return [min(map(priorities.class_of, unit.members)) for unit in self.units]

    def _unit(self, settled: Sequence[_core.Layer], facts: _core.Unit) -> PlannedUnit:
        planned = [self._planned[index] for index in facts.layers]
        members = tuple(one.layer for one in planned)
        count = planned[0].factor_count
        most = max(layer.urgency or 0.0 for layer in members)
        return PlannedUnit(
            members,
            tuple(one.place for one in planned),
            facts,
            count,
            round((1 - most) * len(self.layers)),
            min(1.0, sum(one.presence for one in planned)),  # a group travels whole for any of them
            self._schemes(settled[facts.layers[0]], members[0], count),
        )

    def _schemes(self, planned: _core.Layer, layer: SyncedLayer, count: int) -> tuple[str, ...]:
        best = _core.best_scheme(planned, count, self.core)
        if not count:
            return (best,)
        least = cost.exchanged_bytes(layer, best, count, self.core)
        others = [
            scheme
            for scheme in _core.automatic_schemes(planned, self.core)
            if not takes_factors(scheme) or cost.exchanged_bytes(layer, scheme, count, self.core) <= _MOST_BYTES * least
        ]
        return tuple(dict.fromkeys([best, *others]))

    def model(self, cluster: ClusterSpec, products_per_s: float) -> StepModel:
        """The model of this step with which training chooses its schemes (docs/choice.md)."""
        backward_s = sum(backward for _, backward in self._durations)
        rates = Rates(cluster.payload_bytes_per_s, cluster.latency_s, products_per_s)
        rest_s = self.table.iteration_seconds - backward_s
        return StepModel(self._unit_works, rates, backward_s, rest_s, cluster.products_per_s is None)

    @cached_property
    def _durations(self) -> list[tuple[float, float]]:
        return self.table.durations(self.table.iteration_seconds)

    @cached_property
    def _unit_works(self) -> list[UnitWork]:
        """The units of the model, which do not depend on rates."""
        before_s, works = 0.0, []
        for unit in self.units:
            ready_s = sum(backward for _, backward in self._durations[min(unit.places) :])
            demands = {name: demand(unit.members, name, unit.factor_count, self.core) for name in unit.schemes}
            names = tuple(layer.name for layer in unit.members)
            place = min(layer.position for layer in unit.members)
            works.append(
                UnitWork(names, ready_s, ready_s - before_s, place, self.exchange.overlap, unit.schemes[0], demands)
            )
            before_s = ready_s
        return works

    def multiply_adds(self, unit: PlannedUnit, scheme: str) -> float:
        """Those of the process that makes most of them from the last part to the result."""
        return sum(cost.multiply_adds(layer, scheme, unit.factor_count, self.core) for layer in unit.members)


def is_known(scheme: str) -> bool:
    """Whether predictions know a scheme for all layers: those among which `auto` chooses for dense gradients."""
    return scheme == "auto" or (scheme in SCHEMES and SCHEMES[scheme].automatic and not takes_rows(scheme))


def limits_by_layer(work: Workload) -> dict[str, list[tuple[str, int]]]:
    """For each layer with a choice: the schemes with the fewest bytes, and up to how many workers each has them."""
    found = {}
    for unit in work.units:
        if len(unit.schemes) > 1 and not unit.members[0].row_gradient:
            found[unit.name] = _limits(unit.members[0].asked, unit.factor_count)
    return found


def _limits(layer: _core.Layer, factor_count: int) -> list[tuple[str, int]]:
    def best(count: int) -> str:
        return _core.best_scheme(layer, factor_count, _core.Cluster(count, count))

    def end_of(scheme: str, first: int) -> int:
        """The number from which on it is another one."""
        return bisect_left(range(MOST_WORKERS + 1), True, first, key=lambda count: best(count) != scheme)

    limits, count = [], 2
    while count <= MOST_WORKERS:
        scheme = best(count)
        count = end_of(scheme, count)
        limits.append((scheme, count - 1))
    return limits
