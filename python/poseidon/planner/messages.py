"""Simulates a step message by message: every worker, every port of hosts and switches."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from heapq import heappop, heappush
from typing import NamedTuple

from poseidon.planner.clock import FACTORS, NETWORK, PUSHES, RESULTS, SERVERS, Clock
from poseidon.planner.cluster import ClusterSpec
from poseidon.planner.compute import Durations, Worker
from poseidon.planner.layers import PRIORITY_CLASSES, Exchange
from poseidon.planner.load import HEADER_BYTES, Load
from poseidon.schemes import SCHEMES, takes_factors

# Connections share a port, so a large message does not hold up the others. It goes in pieces of this size.
_PIECE_S = 1e-3
_LEAST_PIECE_BYTES, _MOST_PIECE_BYTES = 1448, 64 << 10
_BEGUN = -1  # the level of a message of which a piece has left

_FlowKey = tuple[int, int, bool]  # class, receiver, whether it carries pushes


class _Message(NamedTuple):
    """A message about a chunk of a unit, and the ports that it passes."""

    load: int
    chunk: int
    receiver: int
    size: float
    is_push: bool
    path: tuple[_Queue, ...]  # after the sender's port
    what: str  # it carries


class _Piece(NamedTuple):
    """A piece of a message at one of its ports. The message is there when its last piece is."""

    message: _Message
    size: float
    is_last: bool
    hop: int


class _Queue:
    """A port in one direction, which sends one piece after another: first come, first served, or by class."""

    def __init__(self, step: MessageStep, name: str, bytes_per_s: float, strict: bool) -> None:
        self._step, self._name, self._rate = step, name, bytes_per_s
        self._classes: tuple[deque[_Piece], ...] = tuple(deque() for _ in range(PRIORITY_CLASSES if strict else 1))
        self._busy = False
        self.busy_s = 0.0

    def put(self, piece: _Piece) -> None:
        """Sends a piece when its turn comes."""
        self._classes[min(self._step.class_of(piece.message), len(self._classes) - 1)].append(piece)
        if not self._busy:
            self._next()

    def _next(self) -> None:
        piece = self._take()
        self._busy = piece is not None
        if piece is not None:
            seconds = piece.size / self._rate
            self.busy_s += seconds
            message = piece.message
            self._step.clock.spend(seconds, self._name, message.what, message.load, self._sent, piece)

    def _take(self) -> _Piece | None:
        for waiting in self._classes:
            if waiting:
                return waiting.popleft()
        return None

    def _sent(self, piece: _Piece) -> None:
        self._step.forward(piece)
        self._next()


class _HostPort(_Queue):
    """A host's own port. Connections of the lowest class take turns. On each the most urgent message goes first, when
    the one that has begun is through."""

    def __init__(self, step: MessageStep, name: str, bytes_per_s: float) -> None:
        super().__init__(step, name, bytes_per_s, True)
        self._flows: dict[_FlowKey, list[tuple[int, int, _Message, int]]] = {}
        self._turns: tuple[deque[_FlowKey], ...] = tuple(deque() for _ in range(PRIORITY_CLASSES))
        self._count = 0

    def send(self, message: _Message) -> None:
        """Sends a message, piece by piece, when its turn comes."""
        traffic_class = self._step.class_of(message)
        flow = (traffic_class, message.receiver, message.is_push)
        waiting = self._flows.setdefault(flow, [])
        if not waiting:
            self._turns[traffic_class].append(flow)
        self._count += 1
        level = self._step.loads[message.load].unit.level
        heappush(waiting, (level, self._count, message, self._step.pieces(message)))
        if not self._busy:
            self._next()

    def _take(self) -> _Piece | None:
        for turns in self._turns:
            if turns:
                flow = turns.popleft()
                waiting = self._flows[flow]
                _, order, message, left = heappop(waiting)
                if left > 1:
                    heappush(waiting, (_BEGUN, order, message, left - 1))
                if waiting:
                    turns.append(flow)
                return _Piece(message, message.size / self._step.pieces(message), left == 1, 0)
        return None


class MessageStep:
    """One step of all workers. `run` simulates it; then `workers` have its times."""

    def __init__(
        self,
        loads: Sequence[Load],
        durations: Sequence[Durations],
        cluster: ClusterSpec,
        exchange: Exchange,
        names: Sequence[str],
        rates: Sequence[float],
    ) -> None:
        """Each host has one worker, which hosts a server, too. `durations` are those of each, `names` the hosts'.

        `rates` are the bytes of payload per second of each host's port.
        """
        self.loads, self._durations, self._cluster = loads, durations, cluster
        self.clock = Clock()
        strict = cluster.strict_priority
        self._piece_bytes = min(max(min(rates) * _PIECE_S, _LEAST_PIECE_BYTES), _MOST_PIECE_BYTES)
        ports = [f"port of {name}" for name in names]
        self._out = [_HostPort(self, port, rate) for port, rate in zip(ports, rates, strict=True)]
        self._in = [_Queue(self, port, rate, strict) for port, rate in zip(ports, rates, strict=True)]
        self._up, self._down = (
            [
                _Queue(self, f"uplink of rack {rack}", cluster.uplink_bytes_per_s, strict)
                for rack in range(cluster.racks)
            ]
            for _ in range(2)
        )
        self.workers = [
            Worker(self.clock, durations[worker], loads, exchange, partial(self._start, worker), name)
            for worker, name in enumerate(names)
        ]
        self._pushes = [self._pushes_of(load) for load in loads]
        self._missing: dict[tuple[int, int], int] = {}  # parts of a chunk that its server has not got
        self._awaited = [
            [len(pushes) or cluster.workers - 1 for pushes in self._pushes] for _ in range(cluster.workers)
        ]

    def run(self) -> None:
        """Simulates the step."""
        for worker in self.workers:
            worker.begin()
        self.clock.run()

    @property
    def busiest_s(self) -> float:
        """How long the port that sends longest does so."""
        return max(port.busy_s for port in (*self._out, *self._in))

    def class_of(self, message: _Message) -> int:
        """The traffic class of a message."""
        return self.loads[message.load].traffic_class

    def _pushes_of(self, load: Load) -> list[tuple[int, float]]:
        """The server of each push of one worker, and the push's bytes. Empty if peers send to each other."""
        if not SCHEMES[load.scheme].uses_servers:
            return []
        chunks = load.unit.chunk_bytes
        if not takes_factors(load.scheme):
            return [(server, size * load.coded[0] + HEADER_BYTES) for server, size in chunks]
        servers = dict.fromkeys(server for server, _ in chunks)
        return [(server, self._share(load.push_bytes, len(servers))) for server in servers]

    def _share(self, port_bytes: float, servers: int) -> float:
        """One worker's message to or from one of the servers of a matrix, of which the busiest port has so many."""
        workers = self._cluster.workers
        return port_bytes / (workers - 1) * workers / servers

    def _start(self, worker: int, index: int) -> None:
        """The worker's gradient of a unit exists. Workers begin with different receivers."""
        count = self._cluster.workers
        if not self._pushes[index]:
            part = self.loads[index].push_bytes / (count - 1)
            for step in range(1, count):
                self._send(index, 0, worker, (worker + step) % count, part, True)
            return
        pushes = self._pushes[index]
        for first in range(0, len(pushes), count):
            chunks = range(first, min(first + count, len(pushes)))
            for step in range(len(chunks)):
                chunk = chunks[(worker + step) % len(chunks)]
                self._send(index, chunk, worker, *pushes[chunk], True)

    def _send(self, load: int, chunk: int, sender: int, receiver: int, size: float, is_push: bool) -> None:
        what = PUSHES if is_push and self._pushes[load] else FACTORS if is_push else RESULTS
        message = _Message(load, chunk, receiver, size, is_push, self._path(sender, receiver), what)
        if not message.path:
            self._arrived(message)
            return
        self._out[sender].send(message)

    def pieces(self, message: _Message) -> int:
        """In how many pieces a message goes."""
        return max(1, round(message.size / self._piece_bytes))

    def _path(self, sender: int, receiver: int) -> tuple[_Queue, ...]:
        if sender == receiver:
            return ()
        here, there = sender // self._cluster.hosts_per_rack, receiver // self._cluster.hosts_per_rack
        if self._cluster.racks > 1 and here != there:
            return self._up[here], self._down[there], self._in[receiver]
        return (self._in[receiver],)

    def forward(self, piece: _Piece) -> None:
        """Takes a piece to the next port on its path, or to its end."""
        if piece.hop < len(piece.message.path):
            piece.message.path[piece.hop].put(piece._replace(hop=piece.hop + 1))
        elif piece.is_last:
            message = piece.message
            self.clock.spend(self._cluster.latency_s, NETWORK, "", message.load, self._arrived, message)

    def _arrived(self, message: _Message) -> None:
        if not message.is_push or not self._pushes[message.load]:
            self._note(message.receiver, message.load)
            return
        key = (message.load, message.chunk)
        self._missing[key] = self._missing.get(key, self._cluster.workers) - 1
        if not self._missing[key]:
            product_s = self.loads[message.load].server_products / self._durations[message.receiver].products_per_s
            self.clock.spend(product_s, SERVERS, "", message.load, self._answer, message)

    def _answer(self, push: _Message) -> None:
        """The server has all parts of a chunk, and sends its result to every worker."""
        load, count = self.loads[push.load], self._cluster.workers
        pushed, returned = load.coded
        size = (push.size - HEADER_BYTES) / pushed * returned + HEADER_BYTES
        if takes_factors(load.scheme):
            size = self._share(load.result_bytes, len(self._pushes[push.load]))
        for step in range(count):
            self._send(push.load, push.chunk, push.receiver, (push.receiver + step) % count, size, False)

    def _note(self, worker: int, index: int) -> None:
        self._awaited[worker][index] -= 1
        if not self._awaited[worker][index]:
            self.workers[worker].arrived(index)
