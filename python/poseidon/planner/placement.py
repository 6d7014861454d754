"""Where a parameter server may stand (Parameter Hub, Figure 4 and §3.4): what each place asks of the ports, and when
adding up by rack first pays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from poseidon import _core
from poseidon.models import ModelTable
from poseidon.planner.cluster import ClusterSpec
from poseidon.planner.predict import Planner, Prediction
from poseidon.rates import rate_text
from poseidon.report.svg import number_text


class Placement(NamedTuple):
    """Where servers run: in words, as the core calls it, and whether there are as many as workers. Otherwise one."""

    words: str
    runs: str
    sharded: bool


PLACEMENTS = {
    "CC": Placement("one server, on a worker's host", "colocated", False),
    "CS": Placement("a shard on every worker's host", "colocated", True),
    "NCC": Placement("one server, on a host of its own", "dedicated", False),
    "NCS": Placement("as many servers as workers, on hosts of their own", "dedicated", True),
}
"""By the paper's names."""

_FLOAT_BYTES = 4


def ps_bits(dense_bytes: int, workers: int, servers: int, runs: str) -> float:
    """What the busiest host sends plus receives of dense gradients in a step."""
    cluster = _core.Cluster(workers, servers, runs)
    return 8 * _core.scheme_cost("ps", dense_bytes, 1, 0, cluster).busiest(cluster)


@dataclass(frozen=True)
class RackPlan:
    """What is asked of the ports by placement (bits per second in each direction), from which oversubscription on
    adding up by rack pays by the paper's rule, and the step without and with it. None: from none."""

    least_bits_per_second: dict[str, float]
    oversubscription: float
    least_oversubscription: float | None
    plain_s: float
    by_rack_s: float

    def notes(self) -> list[str]:
        """Sentences about adding up by rack."""
        steps = (
            f"The simulated step takes {number_text(self.plain_s, 4)} s without it and "
            f"{number_text(self.by_rack_s, 4)} s with it."
        )
        if self.least_oversubscription is None:
            return [f"Adding up by rack cannot pay with one host a rack (Parameter Hub, section 3.4). {steps}"]
        rule = (
            f"Adding up by rack pays above an oversubscription of {number_text(self.least_oversubscription)}:1 by the "
            f"rule of Parameter Hub, section 3.4; here it is {self.oversubscription:g}:1."
        )
        return [f"{rule} {steps}"]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """The placements as a table: its heads and its rows."""
        heads = ["parameter server", "where", "least port"]
        rates = self.least_bits_per_second.items()
        return heads, [[name, PLACEMENTS[name].words, rate_text(rate)] for name, rate in rates]


def plan_racks(planner: Planner, now: Prediction) -> RackPlan:
    """What is said of a cluster of several racks. `now`: the step of this planner's cluster."""
    cluster = planner.cluster
    other = replace(cluster, rack_labels=not cluster.rack_labels)
    step_s = {
        cluster.rack_labels: now.step_s,
        other.rack_labels: Planner(planner.table, other, planner.exchange).predict().step_s,
    }
    return RackPlan(
        least_by_placement(planner.table, cluster),
        cluster.oversubscription,
        least_oversubscription(cluster),
        step_s[False],
        step_s[True],
    )


def least_by_placement(table: ModelTable, cluster: ClusterSpec) -> dict[str, float]:
    """By placement: the bits per second of ports, in each direction, that carry a step's dense gradients while the
    step computes. A host's workers add up before they send."""
    dense_bytes = _FLOAT_BYTES * table.parameter_count
    hosts = cluster.hosts
    return {
        name: ps_bits(dense_bytes, hosts, hosts if place.sharded else 1, place.runs) / 2 / table.iteration_seconds
        for name, place in PLACEMENTS.items()
    }


def least_oversubscription(cluster: ClusterSpec) -> float | None:
    """From which oversubscription on adding up by rack pays by the rule of §3.4. None: from none.

    Shards on all hosts of a rack stand for its PBox, and its uplink for the core. N hosts a rack and R racks:
    N(R − 1)/(R·core) > 1/port + (R − 1)/(R·core), where a core carries N·port over the oversubscription.
    """
    racks, hosts = cluster.racks, cluster.hosts_per_rack
    gained = (racks - 1) / racks * (1 - 1 / hosts)
    return 1 / gained if gained else None
