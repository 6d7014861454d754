"""Parameter Hub's cost model of a data centre (§4.9, Table 5): throughput per $1000."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from poseidon.bench.paper.figure import Figure

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


_FAST = Ports(795, 0, _SWITCH / _SWITCH_PORTS, 94)
_SLOW = Ports(260, 162.5, _SWITCH / _SWITCH_PORTS / _BREAKOUT, 31.25)
_WORKERS_PER_PHUB = {1: 44, 2: 65, 3: 76}  # by oversubscription
# Throughput per $1000: of sharded servers on 100 Gb, and of PHub on 25 Gb by oversubscription.
_TABLE_5 = {
    "future GPUs": (46.11, {1: 55.19, 2: 57.71, 3: 59.03}),
    "spendy": (14.57, {1: 15.30, 2: 15.49, 3: 15.58}),
    "cheap": (60.41, {1: 77.21, 2: 82.24, 3: 84.95}),
}


def throughput_figures() -> Iterator[Figure]:
    """Table 5. The baselines give what the text does not: the throughput, and prices of other GPUs and processors."""
    base = _HOST + _GPUS * _GPU + _FAST.interface + _FAST.shared(1)
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
    shared = _SLOW.shared(oversubscription)
    phub = _PHUB + _PHUB_PORTS * (_SLOW.phub_interface + shared)
    return _HOST + _GPUS * _GPU + _SLOW.interface + shared + phub / _WORKERS_PER_PHUB[oversubscription]
