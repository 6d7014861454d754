"""Bytes that one worker moves per step, as the core plans the layers.

They count bytes sent plus received by one machine that is worker and server at once (colocated shards),
payload only, averaged over the machines.
"""

from __future__ import annotations

from dataclasses import dataclass

from poseidon.adapter import cost
from poseidon.adapter.layer_rules import LayerFacts, LayerRules, LayerWishes
from poseidon.models import LayerSpec, ModelTable
from poseidon.planner import ClusterSpec, Exchange
from poseidon.planner.placement import ps_bits
from poseidon.planner.workload import Workload
from poseidon.schemes import SCHEMES

_ANY_RATE = 1e9  # of a port: bytes do not depend on it


@dataclass
class LayerTraffic:
    """What one worker sends plus receives of a layer in one step. `scheme`: that of its weight."""

    scheme: str = ""
    bytes: float = 0.0


def traffic(table: ModelTable, worker_count: int, exchange: Exchange) -> list[LayerTraffic]:
    """Returns the traffic of each layer, in forward order. ValueError for an unknown scheme or wire format."""
    work = Workload(table, ClusterSpec(worker_count, _ANY_RATE), exchange)
    found = [LayerTraffic() for _ in table.layers]
    for unit in work.units:
        scheme = unit.schemes[0]
        # One machine moves as much as all others together where it has the whole layer.
        share = 2 / worker_count if SCHEMES[scheme].baseline else 1
        for layer, place in zip(unit.members, unit.places, strict=True):
            found[place].bytes += share * cost.exchanged_bytes(layer, scheme, unit.factor_count, work.core)
            if layer.shape == table.layers[place].weight_shape:
                found[place].scheme = scheme
    return found


def dedicated_share(worker_count: int) -> float:
    """What a worker moves with dedicated servers over what it moves with colocated shards, by the parameter server."""
    dedicated, colocated = (ps_bits(1, worker_count, worker_count, runs) for runs in ("dedicated", "colocated"))
    return dedicated / colocated


def averaging_bytes(layer: LayerSpec, worker_count: int, wire: str) -> float:
    """Returns what one worker sends plus receives of a layer when `LocalSGD` averages: parameters come back whole."""
    rules = LayerRules()
    stored = rules.layer(LayerFacts(layer.name, "float32", layer.parameter_count, stored=True), LayerWishes("ps", wire))
    numbers = ps_bits(layer.parameter_count, worker_count, worker_count, "colocated") / 8
    return numbers * rules.terms(stored).bytes_per_value
