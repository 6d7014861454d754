"""The per-layer plan as a user sees it: `DistributedDataParallel.plan()`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from poseidon import _core
from poseidon.adapter.drift import drift_option, ranks_drift
from poseidon.adapter.layer import SyncedLayer
from poseidon.adapter.membership import Membership
from poseidon.adapter.priorities import Priorities
from poseidon.options import Settings
from poseidon.schemes import SCHEMES, takes_factors, takes_rows

_ELEMENT_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_LONG_SECONDS = 1.0
_UNBOUNDED = 2**32 - 1  # the core's K of a gradient that is no sum of factors


@dataclass(frozen=True)
class PlanRow:
    """What the next step does with one layer."""

    layer: str
    shape: tuple[int, ...]
    factor_count: int | None  # mean K over the workers in the last step; None where there is none or not yet
    scheme: str
    wire: str  # how the numbers travel; "fp32": as they are
    bytes: float  # that the busiest node sends and receives per step, by the cost model
    dense_bytes: float  # the same with the parameter server, with numbers as they are
    predicted_seconds: float | None  # on links of the given rate; None without one
    urgency: float | None  # 1 for what forward uses first, towards 0; None: no DistributedOptimizer, or no step yet
    priority_class: int | None  # of the flow that carries it, 0 being brought first; None where urgency is
    reason: str


class PlanTable(list[PlanRow]):
    """The rows in registration order; `str()` gives a table.

    Below it is a sentence about `LocalSGD` if the exchange takes `_LONG_SECONDS` or more on links of the given rate.
    """

    @property
    def exchange_seconds(self) -> float | None:
        """The sum of the predicted times: the least that the exchange of a step takes; None without a link rate."""
        times = [row.predicted_seconds for row in self if row.predicted_seconds is not None]
        return sum(times) if times else None

    def __str__(self) -> str:
        heads = (
            "layer",
            "shape",
            "K",
            "scheme",
            "wire",
            "bytes",
            "dense bytes",
            "seconds",
            "urgency",
            "class",
            "reason",
        )
        cells = [heads] + [
            (
                row.layer,
                "×".join(map(str, row.shape)),
                "" if row.factor_count is None else str(row.factor_count),
                row.scheme,
                row.wire,
                f"{row.bytes:,.0f}",
                f"{row.dense_bytes:,.0f}",
                "" if row.predicted_seconds is None else f"{row.predicted_seconds:.4f}",
                "" if row.urgency is None else f"{row.urgency:.3f}",
                "" if row.priority_class is None else str(row.priority_class),
                row.reason,
            )
            for row in self
        ]
        widths = [max(len(line[column]) for line in cells) for column in range(len(heads))]
        numeric = (2, 5, 6, 7, 8, 9)
        lines = [
            "  ".join(
                cell.rjust(width) if column in numeric else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in cells
        ]
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
) -> PlanTable:
    """The table for the parameters of one model in this job. `link_bits_per_s`: rate of each node's port."""
    if here.client is None:
        reason = "one worker: nothing to send"
        return PlanTable(
            PlanRow(entry.name, entry.shape, None, "local", "fp32", 0.0, 0.0, None, None, None, reason)
            for entry in entries
        )
    return PlanTable(_row(entry, here, here.client, priorities, link_bits_per_s) for entry in entries)


def _row(
    entry: SyncedLayer,
    here: Membership,
    client: _core.Client,
    priorities: Priorities | None,
    link_bits_per_s: float | None,
) -> PlanRow:
    size = here.world_size
    servers = len(here.settings.servers)
    cluster = _core.Cluster(size, servers or size, "dedicated" if servers else "colocated")
    scheme = client.next_scheme(entry.layer)
    factor_count = _mean_factor_count(entry, client, size)
    rows, cols = entry.shape if entry.factorable or entry.row_gradient else (entry.element_count, 1)

    def cost(of: str) -> float:
        return _core.scheme_cost(of, rows, cols, factor_count or 0, cluster).busiest(cluster)

    dense = cost("ps")
    known = scheme == "ps" or factor_count is not None
    value_bytes = entry.bytes_per_factor if takes_factors(scheme) or takes_rows(scheme) else entry.bytes_per_value
    exchanged = (cost(scheme) if known else dense) * value_bytes
    # A port carries both directions at once, if the scheme does.
    directions = 1 if _one_way(scheme, cluster) else 2
    seconds = None if link_bits_per_s is None else exchanged * 8 / directions / link_bits_per_s
    return PlanRow(
        layer=entry.name,
        shape=entry.shape,
        factor_count=factor_count,
        scheme=scheme,
        wire=entry.wire,
        bytes=exchanged,
        dense_bytes=dense * _ELEMENT_BYTES[entry.dtype],
        predicted_seconds=seconds,
        urgency=entry.urgency,
        priority_class=None if priorities is None or entry.urgency is None else priorities.class_of(entry),
        reason=_reason(entry, here.settings, factor_count, {name: cost(name) for name in _compared(cluster)}),
    )


def _mean_factor_count(entry: SyncedLayer, client: _core.Client, worker_count: int) -> int | None:
    if not entry.factorable and not entry.row_gradient:
        return None
    total = client.layer_stats(entry.layer).factor_count
    return math.ceil(total / worker_count) if 0 < total < _UNBOUNDED else None


def _compared(cluster: _core.Cluster) -> list[str]:
    """The schemes among which "auto" chooses for a layer whose gradient may be factors."""
    return [
        name
        for name, scheme in SCHEMES.items()
        if scheme.automatic and not scheme.takes_rows and not _one_way(name, cluster)
    ]


def _one_way(scheme: str, cluster: _core.Cluster) -> bool:
    """Whether the busiest port of the scheme carries one direction at a time."""
    return bool(SCHEMES[scheme].one_way_at_a_time and cluster.placement == "dedicated")


def _reason(entry: SyncedLayer, settings: Settings, factor_count: int | None, costs: dict[str, float]) -> str:
    if entry.on_servers:
        return "updated by the servers"
    if entry.row_gradient:
        return "its gradient has few rows"
    if not entry.factorable:
        return "its gradient is no sum of factors"
    if ranks_drift(settings):
        return f"{drift_option(settings)}: servers complete the steps"
    if entry.grouped:
        return "so small that it travels with others"
    if entry.scheme != "auto":
        return "chosen by the user"
    if factor_count is None:
        return "factor count not known yet"
    return "floats per node: " + ", ".join(
        f"{name} {costs[name]:,.0f}" for name in sorted(costs, key=costs.__getitem__)
    )
