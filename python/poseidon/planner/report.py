"""What `poseidon plan` says of a model on a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from poseidon.adapter import cost
from poseidon.models import ModelTable
from poseidon.planner import advice
from poseidon.planner.cluster import MEMORY_BYTES_PER_S, MOST_RATE, ClusterSpec
from poseidon.planner.critical_path import critical_path, path_words, shares
from poseidon.planner.ddp import ddp_step_s, ddp_words
from poseidon.planner.layers import Exchange
from poseidon.planner.load import Load
from poseidon.planner.placement import RackPlan, plan_racks
from poseidon.planner.predict import Planner, Prediction
from poseidon.rates import format_rate
from poseidon.report.svg import number_text, seconds_text

_NOTICED_S = 5e-5  # shorter waits are none


@dataclass(frozen=True)
class ScalingRow:
    """A number of hosts, and what is predicted of it. `speedup` is over one host.

    `samples_per_dollar`: None without a price (Parameter Hub §4.9).
    """

    hosts: int
    workers: int
    step_s: float
    samples_per_s: float
    speedup: float
    efficiency: float
    samples_per_dollar: float | None

    def cells(self, step: str) -> list[str]:
        """The row of a table, with the time of a step in this text, and the price if there is one."""
        price = [] if self.samples_per_dollar is None else [f"{self.samples_per_dollar:,.0f}"]
        rates = [number_text(self.samples_per_s, 4), f"{self.speedup:.2f}", f"{self.efficiency:.3f}"]
        return [str(self.hosts), str(self.workers), step, *rates, *price]


@dataclass(frozen=True)
class UnitRow:
    """A layer, or a group of small ones. `sent_bytes`: what one host's port sends of it in a step, with headers.

    `exchange_s` lasts from its gradient to its mean. `exposed_s`: how long the accelerator waits for it.
    """

    name: str
    scheme: str
    factor_count: int
    sent_bytes: float
    exchange_s: float
    exposed_s: float
    why: str

    @property
    def hidden(self) -> str:
        """Whether computation hides its exchange, in words."""
        return f"no: {seconds_text(self.exposed_s)}" if self.exposed_s >= _NOTICED_S else "yes"


@dataclass(frozen=True)
class ParameterRow:
    """One parameter: what the plan of training says of it (`model.plan()`). Bytes are sent plus received, in a step."""

    layer: str
    shape: tuple[int, ...]
    factor_count: int | None
    scheme: str
    wire: str
    bytes: float
    dense_bytes: float


@dataclass(frozen=True)
class PlanReport:
    """A plan. `least_bits_per_second`: the slowest ports with which scaling is linear, by exchange; None: there are
    none. `scheme_limits`: each scheme that a layer takes by bytes, and up to how many workers. `step` is that of the
    whole cluster, `ddp_step_s` that of torch's DDP there, and `changes` make it faster. `racks` is there if there are
    several."""

    verdict: str
    model: str
    iteration_source: str
    cluster: ClusterSpec
    exchange: Exchange
    scaling: tuple[ScalingRow, ...]
    units: tuple[UnitRow, ...]
    parameters: tuple[ParameterRow, ...]
    least_bits_per_second: Mapping[str, float | None]
    scheme_limits: Mapping[str, list[tuple[str, int]]]
    step: Prediction
    ddp_step_s: float
    changes: tuple[advice.Change, ...]
    racks: RackPlan | None

    def notes(self) -> list[str]:
        """Sentences below the tables."""
        lines = [
            *([ddp_words(self.ddp_step_s, self.step.step_s)] if self.cluster.workers > 1 else []),
            *([self._bytes_words()] if self.parameters else []),
            f"One worker's step without exchange: {self.iteration_source}.",
            f"Critical path of a step: {path_words(critical_path(self.step))}.",
        ]
        if self.cluster.workers_per_host > 1:
            memory = self.cluster.memory_bytes_per_s
            measured = ", which was measured on 2 cores" if memory == MEMORY_BYTES_PER_S else ""
            lines.append(
                f"Workers of one host exchange {memory / 1e9:g} GB/s each{measured}: host_memory in a cluster file."
            )
        for words, rate in self.least_bits_per_second.items():
            needed = (
                f"needs ports of {format_rate(round(rate, -6))}"
                if rate
                else f"needs more than {format_rate(MOST_RATE)}"
            )
            lines.append(f"Linear scaling (an efficiency of {advice.LINEAR:g}) {needed} with {words}.")
        for name, limits in self.scheme_limits.items():
            schemes = [f"{scheme} up to {count} workers" for scheme, count in limits[:-1]] + [f"then {limits[-1][0]}"]
            if len(limits) > 1:
                lines.append(f"{name} has the fewest bytes by {', '.join(schemes)}.")
        lines += [] if self.racks is None else self.racks.notes()
        first, last = self.scaling[0].samples_per_dollar, self.scaling[-1].samples_per_dollar
        if first and last and len(self.scaling) > 1:
            lines.append(f"A sample costs {first / last:.2f} times what it costs on one host.")
        return lines

    def _bytes_words(self) -> str:
        whole = sum(row.bytes for row in self.parameters)
        return f"The busiest node sends and receives {whole:,.0f} bytes of gradients a step: training's model.plan()."

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "verdict": self.verdict,
            "model": self.model,
            "cluster": asdict(self.cluster),
            "exchange": {name: value for name, value in vars(self.exchange).items() if name != "sizes"},
            "scaling": [asdict(row) for row in self.scaling],
            "layers": [asdict(row) for row in self.units],
            "parameters": [asdict(row) for row in self.parameters],
            "least_bits_per_second": dict(self.least_bits_per_second),
            "scheme_limits": dict(self.scheme_limits),
            "critical_path_s": shares(critical_path(self.step)),
            "ddp_step_s": self.ddp_step_s,
            "racks": None if self.racks is None else asdict(self.racks),
        }


def make_report(table: ModelTable, cluster: ClusterSpec, exchange: Exchange) -> PlanReport:
    """Plans. Raises InvalidArgument for an exchange that no prediction knows."""
    steps = advice.scaling(table, cluster, exchange)
    alone, now = steps[0], steps[-1]
    planner = Planner(table, cluster, exchange)
    better = advice.changes(table, cluster, exchange, now)
    return PlanReport(
        advice.verdict(now, alone, advice.limit(planner, now), better),
        table.name,
        table.iteration_source,
        cluster,
        exchange,
        tuple(_scaling_row(step, alone) for step in steps),
        tuple(_unit_rows(now)),
        tuple(_parameter_rows(now)),
        advice.least_rates(planner) if cluster.hosts > 1 else {},
        planner.scheme_limits(),
        now,
        ddp_step_s(table, cluster),
        tuple(better),
        plan_racks(planner, now) if cluster.racks > 1 else None,
    )


def _scaling_row(step: Prediction, alone: Prediction) -> ScalingRow:
    cluster, speedup = step.cluster, advice.over_one_host(step, alone)
    an_hour = cluster.price * (cluster.hosts + cluster.servers)
    per_dollar = step.samples_per_s * 3600 / an_hour if an_hour else None
    return ScalingRow(
        cluster.hosts, cluster.workers, step.step_s, step.samples_per_s, speedup, step.efficiency, per_dollar
    )


def _unit_rows(step: Prediction) -> list[UnitRow]:
    ready = step.ready_s
    return [
        UnitRow(
            load.unit.name,
            load.scheme,
            load.unit.factor_count,
            load.sent_bytes,
            completed_s - ready[min(load.unit.places)],
            exposed_s,
            _why(load, step),
        )
        for load, completed_s, exposed_s in zip(step.loads, step.completed_s, step.exposed_s, strict=True)
    ]


def _parameter_rows(step: Prediction) -> Iterator[ParameterRow]:
    """In the order of registration where it is known, else in that of forward."""
    core = step.cluster.core()
    rows = {}
    for load in step.loads:
        for layer, index in zip(load.unit.members, load.unit.facts.layers, strict=True):
            count = load.unit.factor_count or None
            known = cost.known_scheme(load.scheme, count)
            rows[index] = ParameterRow(
                layer.name,
                layer.shape,
                count,
                load.scheme,
                layer.wire_of(load.scheme),
                cost.exchanged_bytes(layer, known, count, core) * load.unit.presence,
                cost.dense_bytes(layer, count, core) * load.unit.presence,
            )
    yield from (rows[index] for index in sorted(rows, reverse=True))


def _why(load: Load, step: Prediction) -> str:
    unit = load.unit
    if unit.presence < 1:
        return f"absent in {100 * (1 - unit.presence):.0f} % of steps"
    if len(unit.members) > 1:
        return f"{len(unit.members)} small tensors together"
    if step.exchange.scheme != "auto":
        return "asked for" if load.scheme == step.exchange.scheme else "it has no factors"
    if len(unit.schemes) == 1:
        return "dense gradient"
    if load.scheme != unit.schemes[0]:
        return f"shorter step than {unit.schemes[0]}"
    return "fewest bytes"
