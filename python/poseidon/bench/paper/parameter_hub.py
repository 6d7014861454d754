"""What Parameter Hub's tables and prose say, and the same by its closed forms, with its models' sizes and times.

A PBox counts as servers with a port each (§3.3: its interfaces form micro-shards), which have no other limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from poseidon.bench.paper.figure import Figure
from poseidon.planner.placement import PLACEMENTS, ps_bits

_HOST, _PHUB, _GPU, _GPUS = 4117.0, 8407.0, 699.0, 4
_SWITCH, _SWITCH_PORTS = 21077.0, 32
_BREAKOUT = 4  # ports of 25 Gb that one of 100 Gb gives
_PHUB_PORTS = 20
_BETWEEN_RACKS = 0.98  # of the throughput is left


@dataclass(frozen=True)
class Ports:
    """Prices of a network of one rate: a worker's interface, a PHub's, a switch's port and a cable."""

    interface: float
    phub_interface: float
    switch: float
    cable: float

    def shared(self, oversubscription: int) -> float:
        """A port's switches and cables, up to the core (the paper's A without its N)."""
        return self.switch + self.cable + (4 * self.switch + 2 * self.cable) / oversubscription


_FAST_PORTS = Ports(795, 0, _SWITCH / _SWITCH_PORTS, 94)
_SLOW_PORTS = Ports(260, 162.5, _SWITCH / _SWITCH_PORTS / _BREAKOUT, 31.25)
_WORKERS_PER_PHUB = {1: 44, 2: 65, 3: 76}  # by oversubscription
# Throughput per $1000: of sharded servers on 100 Gb, and of PHub on 25 Gb by oversubscription.
_TABLE_5 = {
    "future GPUs": (46.11, {1: 55.19, 2: 57.71, 3: 59.03}),
    "spendy": (14.57, {1: 15.30, 2: 15.49, 3: 15.58}),
    "cheap": (60.41, {1: 77.21, 2: 82.24, 3: 84.95}),
}


def throughput_figures() -> Iterator[Figure]:
    """Table 5. The baselines give what the text does not: the throughput, and prices of other GPUs and processors."""
    base = _HOST + _GPUS * _GPU + _FAST_PORTS.interface + _FAST_PORTS.shared(1)
    throughput = _TABLE_5["future GPUs"][0] * base
    for name, (sharded, phub) in _TABLE_5.items():
        dearer = throughput / sharded - base  # what these workers cost more than those of the future
        yield _figure(f"{name}, sharded, 100 Gb 1:1", sharded, throughput / (base + dearer), given=True)
        for oversubscription, paper in phub.items():
            ours = _BETWEEN_RACKS * throughput / (_phub_worker(oversubscription) + dearer)
            yield _figure(f"{name}, PHub, 25 Gb {oversubscription}:1", paper, ours)


def _figure(what: str, paper: float, ours: float, *, given: bool = False) -> Figure:
    return Figure("§4.9, Table 5", what, "per $1000", paper, ours, given)


def _phub_worker(oversubscription: int) -> float:
    """What a worker costs with its part of a PHub."""
    shared = _SLOW_PORTS.shared(oversubscription)
    phub = _PHUB + _PHUB_PORTS * (_SLOW_PORTS.phub_interface + shared)
    return _HOST + _GPUS * _GPU + _SLOW_PORTS.interface + shared + phub / _WORKERS_PER_PHUB[oversubscription]


_WORKERS = 8
_PBOX_PORTS = 10
_GBIT = 1e9
_FAST, _CLOUD = 56 * _GBIT, 10 * _GBIT

_PLACES = {name: (_WORKERS if place.sharded else 1, place.runs) for name, place in PLACEMENTS.items()}
"""The number of servers and where they run, by the paper's names (Figure 4)."""


@dataclass(frozen=True)
class Network:
    """A row of Table 3: megabytes of the model, and milliseconds of an iteration on one GTX 1080 Ti."""

    megabytes: float
    milliseconds: float

    def bits(self, servers: int, placement: str) -> float:
        """What the busiest host sends plus receives in an iteration, with so many servers."""
        return ps_bits(round(self.megabytes * 1e6), _WORKERS, servers, placement)

    def step_s(self, servers: int, placement: str, bits_per_second: float) -> float:
        """An iteration whose exchange hides as far as its bytes allow."""
        exchange_s = self.bits(servers, placement) / 2 / bits_per_second
        return max(self.milliseconds / 1e3, exchange_s)


NETWORKS = {
    "AlexNet": Network(194, 16),
    "VGG 11": Network(505, 121),
    "GoogleNet": Network(38, 100),
    "Inception V3": Network(91, 225),
    "ResNet 18": Network(45, 54),
    "ResNet 50": Network(97, 161),
    "ResNet 269": Network(390, 350),
    "ResNext 269": Network(390, 386),
}
_TABLE_2 = {
    "ResNet 269": (122, 31, 140, 17),
    "Inception V3": (44, 11, 50, 6),
    "GoogleNet": (40, 10, 46, 6),
    "AlexNet": (1232, 308, 1408, 176),
}
_COMPUTE_BOUND = ("GoogleNet", "Inception V3", "ResNet 18", "ResNet 50", "ResNet 269", "ResNext 269")


def figures() -> Iterator[Figure]:
    """All figures, in the order of the paper."""
    yield from _least_bandwidth()
    yield from _training()
    yield from throughput_figures()


def _least_bandwidth() -> Iterator[Figure]:
    """Table 2, by the formulas of Figure 4, which are Poseidon's Table 1 for dense gradients."""
    for name, row in _TABLE_2.items():
        network = NETWORKS[name]
        for (words, placement), paper in zip(_PLACES.items(), row, strict=True):
            needed = network.bits(*placement) / (network.milliseconds / 1e3) / _GBIT
            yield Figure("§2.3.1, Table 2", f"{name}, {words}: least bandwidth", "Gb/s", paper, needed)


def _training() -> Iterator[Figure]:
    """Speed-ups of the PBox over colocated shards, and its sharing."""
    gains = {name: _pbox_gain(network, _CLOUD) for name, network in NETWORKS.items()}
    yield Figure("Abstract", "the largest gain of PHub over the state of the art", "times", 2.7, max(gains.values()))
    for name in _COMPUTE_BOUND:
        gain = _pbox_gain(NETWORKS[name], _FAST)
        yield Figure("§4.3.2, Figure 13", f"{name} at 56 Gb/s: PBox over shards", "times", 1.0, gain)
    endless = Network(NETWORKS["ResNet 18"].megabytes, 0.0)
    yield Figure(
        "§4.4, Figure 15", "8 workers over one, infinitely fast compute", "times", _WORKERS, _WORKERS * _share(_WORKERS)
    )
    yield Figure("§4.4, Figure 15", "PBox over PShard, the same", "times", 2.0, _pbox_gain(endless, _FAST))
    yield Figure("§4.8, Figure 18", "AlexNet: throughput of a job if 8 share a PBox", "of it alone", 0.95, _share(8))


def _pbox_gain(network: Network, bits_per_second: float) -> float:
    shards = network.step_s(*_PLACES["CS"], bits_per_second)
    return shards / network.step_s(_PBOX_PORTS, "dedicated", bits_per_second)


def _share(workers: int) -> float:
    """Which part of its port each of so many workers can use if all send to a PBox, whose ports are as fast."""
    return min(1.0, _PBOX_PORTS / workers)
