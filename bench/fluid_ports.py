#!/usr/bin/env python3
"""What granularity costs a step with overlap, on ideal ports: `python bench/fluid_ports.py`. Exchanges nothing.

The bound of `poseidon bench train` looks at one port, and lets a more urgent layer stop another one at any byte. Here
all ports are looked at together, as a fluid: connections share the ports that they cross fairly (max-min), without
headers, latencies and losses. What remains is what a system of messages cannot avoid: a message is sent whole, the
kernel holds some bytes of each connection that nothing overtakes, and a chunk is pulled when every worker has pushed
it. Each connection takes the most urgent message next. The printed figure is the bound's step over this step.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import sys
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from poseidon.bench.training.bound import least_step_seconds
from poseidon.models import ModelTable, model_table, scaled

FLOAT_BYTES = 4
STEPS = 4  # the last one is looked at: the first begins with ports that nothing is on
_LEAST_BYTES = 1e-6  # what remains of a message by rounding


@dataclass(frozen=True)
class Ports:
    """The hosts, and how they send. `uneven`: by how much connections' shares of a port differ from fair ones."""

    hosts: int
    bytes_per_s: float
    chunk_bytes: int
    held_bytes: int
    uneven: float = 0.0


@dataclass(frozen=True, order=True)
class Message:
    """A part of a layer's exchange from one host to another. The least one is the most urgent."""

    layer: int
    chunk: int
    is_pull: bool
    size: float = field(compare=False)


class Connection:
    """The messages from one host to another: those that wait, by urgency, and those that the kernel holds, in order."""

    def __init__(self, held_bytes: int) -> None:
        self._held_bytes = held_bytes
        self._waiting: list[Message] = []
        self.held: deque[Message] = deque()
        self._held_size = 0.0

    def add(self, message: Message) -> None:
        heapq.heappush(self._waiting, message)
        self.fill()

    def fill(self) -> None:
        """Hands over messages, each whole, until the kernel holds enough."""
        while self._waiting and self._held_size < self._held_bytes:
            self.held.append(heapq.heappop(self._waiting))
            self._held_size += self.held[-1].size

    def sent(self) -> Message:
        """The first one has arrived."""
        message = self.held.popleft()
        self._held_size -= message.size
        self.fill()
        return message


class Fluid:
    """What flows between hosts. `rates` has bytes per second of each connection, in the order of `pairs`."""

    def __init__(self, ports: Ports, seed: int = 0) -> None:
        self.pairs = [(a, b) for a in range(ports.hosts) for b in range(ports.hosts) if a != b]
        self._index = {pair: index for index, pair in enumerate(self.pairs)}
        self._connections = [Connection(ports.held_bytes) for _ in self.pairs]
        self._left = np.full(len(self.pairs), np.inf)  # of the message that is being sent
        self._ports = ports
        draw = random.Random(seed)
        self._weights = np.array([draw.uniform(1 - ports.uneven, 1 + ports.uneven) for _ in self.pairs])
        crossing = np.zeros((2 * ports.hosts, len(self.pairs)))  # which connections cross a port, out and in
        for index, (source, target) in enumerate(self.pairs):
            crossing[source, index] = crossing[ports.hosts + target, index] = 1.0
        self._crossing = crossing
        self._rates: np.ndarray | None = None

    def add(self, source: int, target: int, message: Message) -> None:
        index = self._index[source, target]
        connection = self._connections[index]
        if not connection.held:
            self._rates = None
            self._left[index] = message.size
        connection.add(message)

    def seconds_to_next(self) -> float:
        """Seconds until a message arrives, if nothing is added. Infinite if nothing is on its way."""
        return float((self._left / np.maximum(self._rates_now(), 1e-12)).min())

    def pass_time(self, seconds: float) -> list[tuple[int, int, Message]]:
        """Returns what has arrived: source, target and message."""
        self._left -= self._rates_now() * seconds
        arrived = []
        for index in np.flatnonzero(self._left < _LEAST_BYTES):
            connection = self._connections[index]
            arrived.append((*self.pairs[index], connection.sent()))
            self._left[index] = connection.held[0].size if connection.held else np.inf
            if not connection.held:
                self._rates = None
        return arrived

    def _rates_now(self) -> np.ndarray:
        if self._rates is None:
            self._rates = self._max_min(np.isfinite(self._left))
        return self._rates

    def _max_min(self, active: np.ndarray) -> np.ndarray:
        """Fills all connections alike until a port is full, fixes those that cross it, and goes on with the others."""
        rates = np.zeros(len(self.pairs))
        room = np.full(2 * self._ports.hosts, self._ports.bytes_per_s)
        open_weights = np.where(active, self._weights, 0.0)
        while open_weights.any():
            demand = self._crossing @ open_weights
            share = np.where(demand > 0, room / np.maximum(demand, 1e-12), np.inf)
            fixed = (self._crossing[share.argmin()] > 0) & (open_weights > 0)
            rates[fixed] = open_weights[fixed] * share.min()
            room = np.maximum(room - self._crossing[:, fixed] @ rates[fixed], 0.0)
            open_weights[fixed] = 0.0
        return rates


class Steps:
    """Training steps of all hosts, which exchange every layer by the parameter server of which each holds a shard."""

    def __init__(self, table: ModelTable, compute_s: float, ports: Ports) -> None:
        self._ports, self._fluid = ports, Fluid(ports)
        self._durations = table.durations(compute_s)
        self._chunks = _chunks(table, ports)
        self._now, self._order = 0.0, itertools.count()
        self._events: list[tuple[float, int, int, int]] = []  # when, order, host, and the place in its step
        self._pushed: dict[tuple[int, int], int] = {}
        self._awaited = [[0] * len(self._durations) for _ in range(ports.hosts)]  # chunks that have not come
        self._stopped_at: list[int | None] = [None] * ports.hosts  # the layer that a forward pass waits for
        self._begun: list[list[float]] = [[] for _ in range(ports.hosts)]  # backward passes

    def run(self, count: int) -> float:
        """Seconds of the last of `count` steps."""
        for host in range(self._ports.hosts):
            self._backward(host, len(self._durations) - 1)
        while min(map(len, self._begun)) <= count:
            to_event = self._events[0][0] - self._now if self._events else np.inf
            seconds = max(0.0, min(to_event, self._fluid.seconds_to_next()))
            self._now += seconds
            for source, target, message in self._fluid.pass_time(seconds):
                self._arrived(source, target, message)
            while self._events and self._events[0][0] <= self._now + 1e-12:
                _, _, host, place = heapq.heappop(self._events)
                self._computed(host, place)
        return max(begun[count] for begun in self._begun) - max(begun[count - 1] for begun in self._begun)

    def _after(self, seconds: float, host: int, place: int) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._order), host, place))

    def _backward(self, host: int, layer: int) -> None:
        if layer == len(self._durations) - 1:
            self._begun[host].append(self._now)
        self._after(self._durations[layer][1], host, -1 - layer)

    def _forward(self, host: int, layer: int) -> None:
        if layer == len(self._durations):
            self._backward(host, layer - 1)
        elif self._awaited[host][layer]:
            self._stopped_at[host] = layer
        else:
            self._stopped_at[host] = None
            self._after(self._durations[layer][0], host, layer)

    def _computed(self, host: int, place: int) -> None:
        if place >= 0:
            self._forward(host, place + 1)
            return
        layer = -1 - place
        self._awaited[host][layer] = len(self._chunks[layer])
        for chunk, (shard, size) in enumerate(self._chunks[layer]):
            if shard == host:
                self._push(shard, layer, chunk, size)
            else:
                self._fluid.add(host, shard, Message(layer, chunk, False, size))
        if layer:
            self._backward(host, layer - 1)
        else:
            self._forward(host, 0)

    def _arrived(self, source: int, target: int, message: Message) -> None:
        if message.is_pull:
            self._pulled(target, message.layer)
        else:
            self._push(target, message.layer, message.chunk, message.size)

    def _push(self, shard: int, layer: int, chunk: int, size: float) -> None:
        pushed = self._pushed.pop((layer, chunk), 0) + 1
        if pushed < self._ports.hosts:
            self._pushed[layer, chunk] = pushed
            return
        for host in range(self._ports.hosts):
            if host != shard:
                self._fluid.add(shard, host, Message(layer, chunk, True, size))
        self._pulled(shard, layer)

    def _pulled(self, host: int, layer: int) -> None:
        self._awaited[host][layer] -= 1
        if not self._awaited[host][layer] and self._stopped_at[host] == layer:
            self._forward(host, layer)


def _chunks(table: ModelTable, ports: Ports) -> list[list[tuple[int, float]]]:
    """Each layer's chunks: the host that adds it up, and its bytes."""
    shards = itertools.cycle(range(ports.hosts))
    layers = []
    for layer in table.layers:
        size = FLOAT_BYTES * layer.parameter_count
        count = max(1, round(size / ports.chunk_bytes))
        layers.append([(next(shards), size / count) for _ in range(count)] if size else [])
    return layers


def of_bound(table: ModelTable, compute_s: float, ports: Ports) -> float:
    """The bound's step over the step on these ports."""
    share = 2 * (ports.hosts - 1) / ports.hosts / ports.bytes_per_s
    carried = [FLOAT_BYTES * layer.parameter_count * share for layer in table.layers]
    least = least_step_seconds(table, compute_s, 0.0, carried, overlap=True)
    return least / Steps(table, compute_s, ports).run(STEPS)


def main() -> None:
    """Prints a row for each size of messages and of what the kernel holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="BERT-base")
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--scale", type=int, default=4)
    parser.add_argument("--mbit", type=float, default=147.0, help="what plain TCP copies get on a port, in Mb/s")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    table = scaled(model_table(args.model), args.scale)
    compute_s = model_table(args.model).iteration_seconds * args.scale
    rows = []
    for chunk, held, uneven in [(16, 64, 0.0), (16, 16, 0.0), (16, 8, 0.0), (4, 4, 0.0), (16, 64, 0.3), (16, 16, 0.3)]:
        ports = Ports(args.hosts, args.mbit * 125e3, chunk << 10, held << 10, uneven)
        reached = of_bound(table, compute_s, ports)
        rows.append({"chunk_kib": chunk, "held_kib": held, "uneven": uneven, "of_bound": reached})
        if not args.json:
            shares = f", shares that differ by {uneven:.0%}" if uneven else ""
            print(
                f"messages of {chunk:2} KiB, {held:2} KiB held for each connection{shares}: {reached:.3f} of the bound"
            )
    if args.json:
        json.dump(rows, sys.stdout)


if __name__ == "__main__":
    main()
