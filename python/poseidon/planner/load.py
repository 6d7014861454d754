"""What the exchange of a unit puts on a port, on a rack's uplink and on a host's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from poseidon import _core
from poseidon.adapter import cost
from poseidon.adapter.layer import SyncedLayer
from poseidon.planner.cluster import ClusterSpec
from poseidon.planner.workload import PlannedUnit, Workload
from poseidon.schemes import SCHEMES, takes_factors

HEADER_BYTES = _core.MESSAGE_HEADER_BYTES
_PIECES = 64  # in which other classes may stop what workers send each other


@dataclass(frozen=True)
class Load:
    """One unit's exchange under a scheme. It does not depend on rates.

    Bytes are those of one direction: `push` towards servers, or of what peers send each other, and `result` from
    servers, by carrier. `push_bytes` and `result_bytes` are those of the busiest host's port. Both come in `stages`
    equal parts: a part's result can leave when its push has arrived. `excess`: by which fraction the port that has most
    of a stage carries more than an equal share. `worker_products` and `server_products` are multiply-adds after the
    last push has arrived, without a worker's own product, which it would make anyway. `coded`: what travels of each
    byte of a push's values, and of a result's.
    """

    unit: PlannedUnit
    scheme: str
    traffic_class: int
    push_bytes: float
    result_bytes: float
    push: Mapping[str, float]
    result: Mapping[str, float]
    stages: int
    excess: float
    worker_products: float
    server_products: float
    coded: tuple[float, float]

    @property
    def sent_bytes(self) -> float:
        """What the busiest port sends in a step."""
        return self.push_bytes + self.result_bytes


@dataclass(frozen=True)
class Carrier:
    """Something that the bytes of many exchanges pass one after the other: a port, an uplink, a host's memory.

    `push` and `result` are its names in the two directions; equal if it is the same for both. It carries `share` times
    what the busiest port carries in `core`. `between_workers`: it carries what workers send each other.
    `within_host`: it carries values as they are.
    """

    push: str
    result: str
    core: _core.Cluster
    bytes_per_s: float
    share: float = 1.0
    between_workers: bool = True
    within_host: bool = False


def carriers(cluster: ClusterSpec) -> list[Carrier]:
    """What exchanges pass. The first is the one whose bytes are reported: a port, or the memory of a single host."""
    each, core, rate = cluster.workers_per_host, cluster.core(), cluster.payload_bytes_per_s
    if cluster.servers:
        per_server = cluster.workers / cluster.servers  # what a server moves over what a worker moves
        busiest = max(1.0, per_server)
        ends = [
            Carrier("worker out", "worker in", core, rate, 1 / busiest),
            Carrier("server in", "server out", core, rate, per_server / busiest, between_workers=False),
        ]
        return sorted(ends, key=lambda end: -end.share)
    found = [Carrier("port", "port", core, rate)] if cluster.hosts > 1 else []
    if each > 1:
        found.append(
            Carrier("memory", "memory", _core.Cluster(each, each), cluster.memory_bytes_per_s, within_host=True)
        )
    if cluster.racks > 1 and cluster.rack_labels:
        found.append(Carrier("uplink", "uplink", cluster.rack_core(), cluster.uplink_bytes_per_s))
    elif cluster.racks > 1:  # of what a port sends, a part stays in the rack
        rack, hosts = cluster.hosts_per_rack, cluster.hosts
        leaving = rack * (hosts - rack) / (hosts - 1)
        found.append(Carrier("uplink", "uplink", core, cluster.uplink_bytes_per_s, leaving))
    return found


def make_load(
    work: Workload,
    passed: Sequence[Carrier],
    unit: PlannedUnit,
    scheme: str,
    traffic_class: int,
    coded: tuple[float, float],
) -> Load:
    """The load of a unit under a scheme. `passed` has the carriers of the cluster, of which there is at least one."""
    at_servers = SCHEMES[scheme].uses_servers
    if not at_servers:
        passed = [replace(carrier, share=1.0) if work.cluster.servers else carrier for carrier in passed]
        passed = [carrier for carrier in passed if carrier.between_workers]
    parts = [_directions(unit, scheme, carrier, unit.presence, coded) for carrier in passed]
    push = {carrier.push: pushed for carrier, (pushed, _) in zip(passed, parts, strict=True)}
    result = {carrier.result: returned for carrier, (_, returned) in zip(passed, parts, strict=True)}
    stages, excess = _PIECES, 0.0
    if at_servers:
        stages = 1 if takes_factors(scheme) else _stages(unit)
        excess = _imbalance(unit, work.core.server_count) - 1
    products = work.multiply_adds(unit, scheme) * unit.presence
    own = 1 - 1 / work.cluster.workers
    worker_products, server_products = (0.0, products) if at_servers else (products * own, 0.0)
    products_of = (worker_products, server_products)
    return Load(unit, scheme, traffic_class, *parts[0], push, result, stages, excess, *products_of, coded)


def _stages(unit: PlannedUnit) -> int:
    """The chunks of the unit on the server that has most of them."""
    counts: dict[int, int] = {}
    for server, _ in unit.chunk_bytes:
        counts[server] = counts.get(server, 0) + 1
    return max(counts.values())


def _imbalance(unit: PlannedUnit, server_count: int) -> float:
    """What the server with most of the unit has, over an equal share."""
    by_server: dict[int, float] = {}
    for server, size in unit.chunk_bytes:
        by_server[server] = by_server.get(server, 0.0) + size
    return max(by_server.values()) * server_count / sum(by_server.values())


def _directions(
    unit: PlannedUnit, scheme: str, carrier: Carrier, presence: float, coded: tuple[float, float]
) -> tuple[float, float]:
    """The bytes that a carrier carries in one direction before servers add up, and after, in the mean of the steps.

    Where a unit has no gradient its headers travel.
    """
    core, count = carrier.core, unit.factor_count
    dedicated = core.placement == "dedicated"
    one_way = sum(cost.exchanged_bytes(layer, scheme, count, core) for layer in unit.members) / 2
    if not SCHEMES[scheme].uses_servers:
        pushed, result = one_way, 0.0
        messages = (one_way / _part_bytes(unit, scheme), 0.0)
    elif takes_factors(scheme):
        result = _dense_result_bytes(unit.members[0], core)
        pushed = (2 if dedicated else 1) * one_way - result
        servers = float(min(core.server_count, len(unit.chunk_bytes)))
        messages = (servers, servers)
    else:
        pushed = result = one_way if dedicated else one_way / 2
        whole = sum(size for _, size in unit.chunk_bytes)
        messages = (len(unit.chunk_bytes) * pushed / whole,) * 2
    shares = (1.0, 1.0) if carrier.within_host else coded
    return (
        (pushed * presence * shares[0] + messages[0] * HEADER_BYTES) * carrier.share,
        (result * presence * shares[1] + messages[1] * HEADER_BYTES) * carrier.share,
    )


def _part_bytes(unit: PlannedUnit, scheme: str) -> float:
    """What one worker sends to another, where workers send their parts to each other."""
    pair = _core.Cluster(2, 2)
    return sum(cost.exchanged_bytes(layer, scheme, unit.factor_count, pair) for layer in unit.members) / 2


def _dense_result_bytes(layer: SyncedLayer, core: _core.Cluster) -> float:
    """What a port carries in one direction when servers return a matrix that they have multiplied."""
    numbers = cost.numbers(layer, "ps", None, core) / 2
    return (numbers if core.placement == "dedicated" else numbers / 2) * layer.terms.bytes_per_factor
