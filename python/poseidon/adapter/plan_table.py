"""The per-layer plan as a user sees it: `DistributedDataParallel.plan()`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from poseidon import _core
from poseidon.adapter import cost
from poseidon.adapter.choice.choices import Choices
from poseidon.adapter.layer import SyncedLayer
from poseidon.adapter.membership import Membership
from poseidon.adapter.priorities import Priorities
from poseidon.schemes import is_lossy, takes_rows

_LONG_SECONDS = 1.0
CHOSEN_BY_USER = "chosen by the user"
"""The reason of a layer whose scheme was asked for by name."""


@dataclass(frozen=True)
class PlanRow:
    """What the next step does with one layer."""

    layer: str
    shape: tuple[int, ...]
    factor_count: int | None  # mean K over the workers in the last step; None where there is none or not yet
    scheme: str
    wire: str  # how the numbers travel; "fp32": as they are
    # That the busiest node sends and receives per step, by the cost model, in the mean of the steps so far.
    bytes: float
    carried_bytes: float  # of these, what its port carries in one direction, or in both if they follow one another
    dense_bytes: float  # the same as `bytes` with the parameter server, with numbers as they are
    predicted_seconds: float | None  # of its exchange: with the measured rates, or on links of the given rate
    measured_seconds: float | None  # of its exchange, from when its gradient exists; None: not measured yet
    urgency: float | None  # 1 for what forward uses first, towards 0; None: no DistributedOptimizer, or no step yet
    priority_class: int | None  # of the flow that carries it, 0 being brought first; None where urgency is
    reason: str
    counts_rows: bool = False  # factor_count is that of its gradient's rows
    dtype: str = "float32"


def _written(value: float | None, form: str = "") -> str:
    return "" if value is None else format(value, form)


_COLUMNS: Mapping[str, Callable[[PlanRow], str]] = {
    "layer": lambda row: row.layer,
    "shape": lambda row: "×".join(map(str, row.shape)),
    "K": lambda row: _written(row.factor_count),
    "scheme": lambda row: row.scheme,
    "wire": lambda row: row.wire,
    "bytes": lambda row: f"{row.bytes:,.0f}",
    "dense bytes": lambda row: f"{row.dense_bytes:,.0f}",
    "predicted s": lambda row: _written(row.predicted_seconds, ".4f"),
    "measured s": lambda row: _written(row.measured_seconds, ".4f"),
    "urgency": lambda row: _written(row.urgency, ".3f"),
    "class": lambda row: _written(row.priority_class),
    "reason": lambda row: row.reason,
}
_NUMBERS = ("K", "bytes", "dense bytes", "predicted s", "measured s", "urgency", "class")


class PlanTable(list[PlanRow]):
    """The rows in registration order; `str()` gives a table.

    Below it is a sentence about `LocalSGD` if the exchange takes `_LONG_SECONDS` or more on links of this rate.
    `link_bits_per_s` is the rate that was given or measured; None without one. `tree` has a line for each machine or
    rack whose workers add up among themselves, and is empty if none do. `coded_share` is what has travelled so far, as
    a share of the bytes that it would have been without coding; bytes in the table are those.
    """

    link_bits_per_s: float | None = None
    tree: Sequence[str] = ()
    coded_share: float = 1.0

    @property
    def exchange_seconds(self) -> float | None:
        """The least time that the exchange of a step takes without coding; None without a link rate."""
        if self.link_bits_per_s is None or not self:
            return None
        return sum(row.carried_bytes for row in self) * 8 / self.link_bits_per_s

    def __str__(self) -> str:
        cells = [tuple(_COLUMNS), *(tuple(text_of(row) for text_of in _COLUMNS.values()) for row in self)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(width) if name in _NUMBERS else cell.ljust(width)
                for name, cell, width in zip(_COLUMNS, line, widths, strict=True)
            ).rstrip()
            for line in cells
        ]
        lines += self.tree
        if self.coded_share < 1:
            lines.append(
                f"Coding has sent {100 * self.coded_share:.0f} % of these bytes so far, with the same values "
                "(docs/coding.md)."
            )
        seconds = self.exchange_seconds
        if seconds is not None and seconds >= _LONG_SECONDS:
            lines.append(
                f"On this link the exchange takes {seconds:.1f} s a step or more. If a step computes for much less, "
                "use poseidon.LocalSGD, which exchanges once in many steps (docs/local-sgd.md)."
            )
        return "\n".join(lines)


def make_plan_table(
    entries: Sequence[SyncedLayer],
    here: Membership,
    priorities: Priorities | None = None,
    link_bits_per_s: float | None = None,
    choices: Choices | None = None,
) -> PlanTable:
    """The table for the parameters of one model in this job. `link_bits_per_s`: rate of each node's port.

    `choices` of the model give measured times, the times that they predict, and reasons.
    """
    client = here.client
    if client is None:
        reason = "one worker: nothing to send"
        return PlanTable(
            PlanRow(entry.name, entry.shape, None, "local", "fp32", 0.0, 0.0, 0.0, None, None, None, None, reason)
            for entry in entries
        )
    cluster, presences = client.cluster, _presence_by_unit(entries, client)
    seconds = {} if choices is None else choices.seconds()
    reasons = {} if choices is None else choices.reasons()

    def row(entry: SyncedLayer) -> PlanRow:
        presence = presences[entry.unit]
        returns = presence < 1 and entry.mostly_returns(client.layer_stats(entry.layer).step)
        scheme = client.next_scheme(entry.layer)
        if returns:  # nothing is known of its factors
            scheme = entry.terms.schemes[0] if entry.scheme == "auto" else entry.scheme
        factor_count = _factor_count(entry, client)
        known = cost.known_scheme(scheme, factor_count)
        carried = cost.carried_bytes(entry, known, factor_count, cluster) * presence
        predicted_s, measured_s = seconds.get(entry.name, (None, None))
        return PlanRow(
            layer=entry.name,
            shape=entry.shape,
            factor_count=factor_count,
            scheme=scheme,
            wire=entry.wire_of(scheme),
            bytes=cost.exchanged_bytes(entry, known, factor_count, cluster) * presence,
            carried_bytes=carried,
            dense_bytes=cost.dense_bytes(entry, factor_count, cluster) * presence,
            predicted_seconds=predicted_s if link_bits_per_s is None else carried * 8 / link_bits_per_s,
            measured_seconds=measured_s,
            urgency=entry.urgency,
            priority_class=None if priorities is None or entry.urgency is None else priorities.class_of(entry),
            reason=reasons.get(entry.name) or _reason(entry, scheme, factor_count, cluster, presence),
            counts_rows=entry.row_gradient,
            dtype=entry.dtype,
        )

    traffic = client.traffic()
    plain_bytes = traffic.plain_bytes_sent + traffic.plain_bytes_received
    table = PlanTable(map(row, entries))
    if plain_bytes > 0:
        table.coded_share = (traffic.bytes_sent + traffic.bytes_received) / plain_bytes
    table.tree = _tree(cluster)
    table.link_bits_per_s = link_bits_per_s
    if link_bits_per_s is None and choices is not None and (model := choices.model()) is not None:
        table.link_bits_per_s = 8 * model.rates.link_bytes_per_s
    return table


def _tree(cluster: _core.Cluster) -> list[str]:
    """Who adds up with whom before the servers do (docs/hosts.md)."""
    ranks: dict[int, list[int]] = {}
    racks: dict[int, list[int]] = {}
    for rank, host in enumerate(cluster.hosts):
        ranks.setdefault(host, []).append(rank)
    for host, of_host in ranks.items():
        racks.setdefault(cluster.racks[of_host[0]] if cluster.racks else host, []).append(host)
    machines = {host: f"machine {host} (ranks {', '.join(map(str, of_host))})" for host, of_host in ranks.items()}
    if not cluster.racks:
        return [f"adds up: {machine}" for machine in machines.values()]
    return [f"adds up: rack {rack}: {', '.join(machines[host] for host in hosts)}" for rack, hosts in racks.items()]


def _presence_by_unit(entries: Sequence[SyncedLayer], client: _core.Client) -> dict[tuple[int, int], float]:
    """The part of the steps so far in which each unit had a gradient on some rank.

    A group travels whole if one of its layers has one: at most as often as their parts of the steps together.
    """
    found: dict[tuple[int, int], float] = {}
    for entry in entries:
        own = entry.presence(client.layer_stats(entry.layer).step)
        found[entry.unit] = min(1.0, found.get(entry.unit, 0.0) + own)
    return found


def _factor_count(entry: SyncedLayer, client: _core.Client) -> int | None:
    if not entry.factorable and not entry.row_gradient:
        return None
    seen = cost.mean_factor_count(client.layer_stats(entry.layer).factor_count, client.world_size)
    return round(entry.settled_count) if seen is None and entry.settled_count is not None else seen


def _reason(entry: SyncedLayer, scheme: str, factor_count: int | None, cluster: _core.Cluster, presence: float) -> str:
    terms = entry.terms
    if presence < 1:
        return f"no gradient in {100 * (1 - presence):.0f} % of the steps so far, in which it sends nothing"
    if entry.row_gradient and not terms.grouped:
        if takes_rows(scheme):
            return "its gradient has few rows"
        return "row count not known yet" if factor_count is None else "its gradient has many rows"
    if is_lossy(scheme):
        return "lossy, chosen by the user" if terms.scheme == scheme else "lossy, as allowed, with fewer bytes"
    if is_lossy(terms.scheme):
        return f"exact in the first steps, then {terms.scheme}"
    if entry.settled_count is not None:
        return f"the fewest bytes for K = {entry.settled_count:g}, for good"
    if terms.reason:
        return terms.reason
    if factor_count is None:
        return "factor count not known yet"
    costs = {
        scheme: cost.exchanged_bytes(entry, scheme, factor_count, cluster)
        for scheme in _core.automatic_schemes(entry.asked, cluster)
    }
    return "bytes per node: " + ", ".join(f"{name} {costs[name]:,.0f}" for name in sorted(costs, key=costs.__getitem__))
