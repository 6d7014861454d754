"""Advice on a cluster: what limits its steps, what would make them faster, and how slow its ports may be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from poseidon.models import ModelTable
from poseidon.planner.cluster import MOST_RATE, ClusterSpec
from poseidon.planner.layers import Exchange
from poseidon.planner.predict import Planner, Prediction
from poseidon.rates import LEAST_RATE, format_rate

LINEAR = 0.95
"""The efficiency from which on scaling counts as linear."""

_LINKS = (1e9, 2.5e9, 1e10, 2.5e10, 4e10, 1e11)  # bits per second of Ethernet that can be bought
_MOST_PER_HOST = 16  # accelerators that one machine can have
_WORTH = 1.05  # a change that gains less is not advised
_PRECISION = 1.03  # of the search for a rate


@dataclass(frozen=True)
class Change:
    """A change of the cluster or of the exchange, in words, and the step that it gives."""

    words: str
    prediction: Prediction


def over_one_host(prediction: Prediction, alone: Prediction) -> float:
    """How many times as many samples a second as one host, of which `alone` is the prediction."""
    return prediction.samples_per_s / alone.samples_per_s


def scaling(table: ModelTable, cluster: ClusterSpec, exchange: Exchange) -> list[Prediction]:
    """Steps of 1, 2, 4, … hosts, up to those of the cluster. They fill one rack after another.

    Counts that cannot be spread evenly over their racks are left out. There are servers in proportion.
    """
    counts = [1]
    while counts[-1] * 2 < cluster.hosts:
        counts.append(counts[-1] * 2)
    counts += [cluster.hosts] if cluster.hosts > 1 else []
    even = [count for count in counts if count % _racks_of(cluster, count) == 0]
    return [Planner(table, _resized(cluster, count), exchange).predict() for count in even]


def _racks_of(cluster: ClusterSpec, hosts: int) -> int:
    return -(-hosts // cluster.hosts_per_rack)


def _resized(cluster: ClusterSpec, hosts: int) -> ClusterSpec:
    servers = -(-cluster.servers * hosts // cluster.hosts) if hosts > 1 else 0
    smaller = replace(cluster, oversubscription=1.0, rack_labels=False, racks=1, servers=0)
    if (racks := _racks_of(cluster, hosts)) == 1:
        slowest = cluster.slowest if hosts * cluster.workers_per_host > 1 else 1.0
        return replace(smaller, hosts=hosts, servers=servers, slowest=slowest)
    return replace(cluster, hosts=hosts, racks=racks)


def limit(planner: Planner, prediction: Prediction) -> str:
    """What the step would gain most from, in words."""
    if prediction.efficiency >= LINEAR:
        return "Compute is the limit: the exchange hides behind it."
    cluster = prediction.cluster
    if cluster.hosts == 1:
        return "The memory of the host is the limit."
    faster = {
        "The port": replace(
            cluster, bits_per_second=2 * cluster.bits_per_second, oversubscription=_scaled(cluster, 2.0)
        ),
        "The racks' uplink": replace(cluster, oversubscription=_scaled(cluster, 0.5)),
        "The memory of the hosts": replace(cluster, memory_bytes_per_s=2 * cluster.memory_bytes_per_s),
        "The product of factors": replace(cluster, products_per_s=float("inf")),
        "The slowest worker": replace(cluster, slowest=1.0),
        "The latency of messages": replace(cluster, latency_s=0.0),
    }
    steps = {words: planner.predict(other).step_s for words, other in faster.items()}
    return f"{min(steps, key=steps.__getitem__)} is the limit."


def _scaled(cluster: ClusterSpec, factor: float) -> float:
    return max(1.0, cluster.oversubscription * factor) if cluster.racks > 1 else 1.0


def changes(table: ModelTable, cluster: ClusterSpec, exchange: Exchange, now: Prediction) -> list[Change]:
    """Changes that gain at least 5 %, the best first."""
    found = [Change(words, Planner(table, spec, one).predict()) for words, spec, one in _others(cluster, exchange)]
    worth = [change for change in found if _gains(change.prediction, now)]
    worth += _faster_links(table, cluster, exchange, now) if cluster.hosts > 1 else []
    return sorted(worth, key=lambda change: -change.prediction.samples_per_s)


def _gains(prediction: Prediction, before: Prediction) -> bool:
    return prediction.samples_per_s >= _WORTH * before.samples_per_s


def _others(cluster: ClusterSpec, exchange: Exchange) -> Iterator[tuple[str, ClusterSpec, Exchange]]:
    """What could be different, in words, and the cluster and the exchange that it gives."""
    overlapping = replace(exchange, overlap=True)
    if cluster.slowest > 1:
        yield "no slow worker", replace(cluster, slowest=1.0), exchange
    if cluster.racks > 1 and not cluster.rack_labels:
        yield "adding up by rack", replace(cluster, rack_labels=True), exchange
    if exchange.wire == "fp32":
        yield "bf16", cluster, replace(exchange, wire="bf16")
    if not exchange.overlap:
        yield "DistributedOptimizer", cluster, overlapping
    if not exchange.overlap and exchange.wire == "fp32":
        yield "bf16 with a DistributedOptimizer", cluster, replace(overlapping, wire="bf16")
    if cluster.hosts > 1 and cluster.workers <= _MOST_PER_HOST:
        single = ClusterSpec(1, cluster.bits_per_second, workers_per_host=cluster.workers)
        yield f"one host with {cluster.workers} workers", single, exchange


def _faster_links(table: ModelTable, cluster: ClusterSpec, exchange: Exchange, now: Prediction) -> list[Change]:
    """The links that can be bought, up to the one after which a faster one gains nothing."""
    planner, found = Planner(table, cluster, exchange), list[Change]()
    for rate in [link for link in _LINKS if link > cluster.bits_per_second]:
        faster = planner.predict(replace(cluster, bits_per_second=rate))
        if not _gains(faster, found[-1].prediction if found else now):
            break
        found.append(Change(format_rate(rate), faster))
    return found


def least_rates(planner: Planner) -> dict[str, float | None]:
    """For some exchanges: bits per second of the slowest ports with which the efficiency is LINEAR. None: no port has
    them."""
    exchange = planner.exchange
    others = {
        "these settings": exchange,
        "every layer by ps": replace(exchange, scheme="ps"),
        "bf16": replace(exchange, wire="bf16"),
        "a DistributedOptimizer": replace(exchange, overlap=True),
    }
    found = {}
    for words, other in others.items():
        if words == "these settings" or other != exchange:
            found[words] = _least_rate(Planner(planner.table, planner.cluster, other))
    return found


def _least_rate(planner: Planner) -> float | None:
    def is_linear(rate: float) -> bool:  # of workers as fast as each other: no port makes up for a slow one
        return planner.predict(replace(planner.cluster, bits_per_second=rate, slowest=1.0)).efficiency >= LINEAR

    low, high = float(LEAST_RATE), float(MOST_RATE)
    if not is_linear(high):
        return None
    while high > low * _PRECISION:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if is_linear(middle) else (middle, high)
    return high


def verdict(now: Prediction, alone: Prediction, limited_by: str, better: Sequence[Change]) -> str:
    """The prediction in words."""
    speed = over_one_host(now, alone)
    words = [f"{now.cluster}: {_times(speed)} one host." if now.cluster.hosts > 1 else f"{now.cluster}."]
    if now.cluster.workers > 1:
        words.append(limited_by)
    gains = [f"{change.words} gives {_times(over_one_host(change.prediction, alone))}" for change in better]
    if gains:
        words.append("What would help: " + "; ".join(gains) + ".")
    elif now.cluster.workers > 1:
        words.append("No change of links, wire format or optimizer gains 5 %.")
    if now.cluster.hosts > 1 and speed < 1:
        words.append("One host alone is faster: do not use more with these settings.")
    return " ".join(words)


def _times(speed: float) -> str:
    return f"{speed:.0f} x" if speed >= 100 else f"{speed:.1f} x"
