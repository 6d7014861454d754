"""Simulates a step by classes of equal workers: in synchronous training one port stands for all.

All workers exchange the same bytes at the same times, so the ports of all hosts are busy alike. Where every worker
hosts a shard, a port sends pushes and results. With dedicated servers the ports of workers and servers differ, in each
direction. Bytes pass all their carriers at once, as packets do, and have passed when the slowest has carried them.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from poseidon.planner.clock import FACTORS, NETWORK, PUSHES, RESULTS, SERVERS, Clock
from poseidon.planner.cluster import ClusterSpec
from poseidon.planner.compute import Durations, Worker
from poseidon.planner.layers import Exchange
from poseidon.planner.load import Load, carriers
from poseidon.schemes import SCHEMES

_PUSH, _RESULT, _TO_PEERS = range(3)
_WORDS = (PUSHES, RESULTS, FACTORS)
_BEGUN = -1  # the level of a message of which a part has left: no other of its class overtakes it


class _Stage:
    """A part of a unit's push or result that is on its way; `left` of its carriers have not carried it yet."""

    def __init__(self, kind: int, index: int, left: int) -> None:
        self.kind, self.index, self.left = kind, index, left


class _Carrying:
    """A carrier. Each kind has connections of its own, which take turns. On each the most urgent goes first, and lower
    classes before all others."""

    def __init__(self, step: ClassStep, name: str) -> None:
        self._step, self._name = step, name
        self._waiting: tuple[list[tuple[int, int, int, float, _Stage]], ...] = ([], [], [])
        self._busy = False
        self._count = 0
        self._last = _RESULT
        self.busy_s = 0.0

    def put(self, stage: _Stage, traffic_class: int, level: int, seconds: float) -> None:
        """Carries a stage when its turn comes."""
        self._count += 1
        heappush(self._waiting[stage.kind], (traffic_class, level, self._count, seconds, stage))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        kind = self._kind()
        self._busy = kind is not None
        if kind is not None:
            self._last = kind
            _, _, _, seconds, stage = heappop(self._waiting[kind])
            self.busy_s += seconds
            self._step.clock.spend(seconds, self._name, self._step.word(stage), stage.index, self._carried, stage)

    def _kind(self) -> int | None:
        lowest = min((waiting[0][0] for waiting in self._waiting if waiting), default=None)
        for step in range(1, len(self._waiting) + 1):
            kind = (self._last + step) % len(self._waiting)
            if self._waiting[kind] and self._waiting[kind][0][0] == lowest:
                return kind
        return None

    def _carried(self, stage: _Stage) -> None:
        self._step.carried(stage)  # first, so that a message that has begun goes on
        self._next()


class ClassStep:
    """One step. `run` simulates it; then `worker` has its times."""

    def __init__(self, loads: Sequence[Load], durations: Durations, cluster: ClusterSpec, exchange: Exchange) -> None:
        self.loads = loads
        self.clock = Clock()
        self._durations, self._latency_s = durations, cluster.latency_s
        # Where workers host the shards, what they send each other shares the connections of pushes.
        self._to_peers = _TO_PEERS if cluster.servers else _PUSH
        self._rates = {
            name: carrier.bytes_per_s for carrier in carriers(cluster) for name in (carrier.push, carrier.result)
        }
        self.carriers = {name: _Carrying(self, name) for name in self._rates}
        self._left = [load.stages for load in loads]
        self.worker = Worker(self.clock, durations, loads, exchange, self._start)

    def run(self) -> None:
        """Simulates the step."""
        self.worker.begin()
        self.clock.run()

    def _start(self, index: int) -> None:
        load = self.loads[index]
        if not SCHEMES[load.scheme].uses_servers:
            self._send(self._to_peers, index, load.unit.level)
            return
        for _ in range(load.stages):
            self._send(_PUSH, index, load.unit.level)

    def _send(self, kind: int, index: int, level: int) -> None:
        load = self.loads[index]
        sizes = load.result if kind == _RESULT else load.push
        stage = _Stage(kind, index, len(sizes))
        for name, size in sizes.items():
            self.carriers[name].put(stage, load.traffic_class, level, size / load.stages / self._rates[name])

    def word(self, stage: _Stage) -> str:
        """What a stage carries, in a word."""
        return _WORDS[stage.kind if SCHEMES[self.loads[stage.index].scheme].uses_servers else _TO_PEERS]

    def _excess_s(self, load: Load) -> float:
        """How much longer than the others the port takes that has most of a stage."""
        return (
            load.excess
            and load.excess * max(size / self._rates[name] for name, size in load.push.items()) / load.stages
        )

    def carried(self, stage: _Stage) -> None:
        """One of the stage's carriers has carried it."""
        stage.left -= 1
        if stage.left:
            return
        load = self.loads[stage.index]
        if not SCHEMES[load.scheme].uses_servers:
            self._ended(stage.index, 0.0)
            if self._left[stage.index]:
                self._send(self._to_peers, stage.index, _BEGUN)
        elif stage.kind == _PUSH:
            product_s = load.server_products / self._durations.products_per_s
            after_s = self._latency_s + self._excess_s(load) + product_s
            self.clock.spend(after_s, SERVERS, "", stage.index, self._send, _RESULT, stage.index, load.unit.level)
        else:
            self._ended(stage.index, self._excess_s(load))

    def _ended(self, index: int, excess_s: float) -> None:
        self._left[index] -= 1
        if not self._left[index]:
            self.clock.spend(self._latency_s + excess_s, NETWORK, "", index, self.worker.arrived, index)
