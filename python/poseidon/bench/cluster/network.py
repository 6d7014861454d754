"""What the ports between the machines do: round trips, rates of all pairs, and one large sum."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

_TRIPS = 50
_LEAD_S, _RATE_S = 0.2, 0.6
_PIECE = 1 << 20
_PATIENCE_S = 30.0
_SUM_S = 0.5  # about what one sum takes
_MOST_SUM_BYTES, _SUMS = 256 << 20, 5


def measure_pairs(
    rank: int, addresses: Sequence[str], ports: Sequence[int], listener: socket.socket, meet: Callable[[], None]
) -> tuple[list[float], list[float]]:
    """Bytes per second to each machine and the least round trip, by its number; 0 for this one. Collective.

    In each round every machine has one partner, and both send as fast as they can. `listener` is this machine's, at its
    address and port. `meet` returns when all machines have called it.
    """
    rates, trips = [0.0] * len(addresses), [0.0] * len(addresses)
    for partner in _partners(rank, len(addresses)):
        meet()
        if partner is None:
            continue
        with _connection(rank, partner, (addresses[partner], ports[partner]), listener) as one:
            one.settimeout(_PATIENCE_S)
            trips[partner] = _round_trip(one, rank < partner)
            rates[partner] = _rate(one)
    meet()
    return rates, trips


def _partners(rank: int, count: int) -> Iterator[int | None]:
    """The partner of each round, in which all have another one (the circle method). None: this machine has a rest."""
    size = count + count % 2
    for number in range(size - 1):
        circle = [size - 1, *((number + place) % (size - 1) for place in range(size - 1))]
        partner = circle[size - 1 - circle.index(rank)]
        yield partner if partner < count else None


def _connection(rank: int, partner: int, there: tuple[str, int], listener: socket.socket) -> socket.socket:
    if rank < partner:
        return socket.create_connection(there, _PATIENCE_S)
    listener.settimeout(_PATIENCE_S)
    return listener.accept()[0]


def _round_trip(one: socket.socket, asks: bool) -> float:
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    best = float("inf")
    for _ in range(_TRIPS):
        begin = time.monotonic()
        if asks:
            one.sendall(b"?")
        one.recv(1)
        if not asks:
            one.sendall(b"!")
        best = min(best, time.monotonic() - begin)
    # The one that answers has waited for questions, which are as far apart as the trips are long.
    return best


def _rate(one: socket.socket) -> float:
    """What arrives in a while. Both send at the same time."""
    sender = threading.Thread(target=_send, args=(one,))
    sender.start()
    begin = time.monotonic()
    count, counted_from = 0, 0.0
    last = begin
    while data := one.recv(_PIECE):
        last = time.monotonic()
        if counted_from:
            count += len(data)
        elif last - begin >= _LEAD_S:
            counted_from = last
    sender.join()
    return count / (last - counted_from) if last > counted_from > 0 else 0.0


def _send(one: socket.socket) -> None:
    piece, end = bytes(_PIECE), time.monotonic() + _LEAD_S + _RATE_S
    while time.monotonic() < end:
        one.sendall(piece)
    one.shutdown(socket.SHUT_WR)


def measure_sum(port_bytes_per_s: float, group: dist.ProcessGroup, world_size: int) -> float:
    """What each port sends per second while all machines add up arrays of this group, as without coding. Collective."""
    carried = 2 * (world_size - 1) / world_size  # of each byte, in each direction
    size = min(_MOST_SUM_BYTES, int(port_bytes_per_s * _SUM_S / carried))
    array = torch.randn(max(1, size // 4))
    seconds = []
    for _ in range(_SUMS):
        dist.barrier(group)
        begin = time.monotonic()
        dist.all_reduce(array.clone(), group=group)
        seconds.append(time.monotonic() - begin)
    return carried * array.nbytes / sorted(seconds)[_SUMS // 2]
