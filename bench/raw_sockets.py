#!/usr/bin/env python3
"""What the kernel takes for the bytes of collectives, by blocking sockets alone: `python bench/raw_sockets.py`.

Four processes of this machine send the bytes of an all-to-all, and of a broadcast in which each rank passes its share
on, over loopback TCP, with a thread for each direction of each connection. Nothing is checked, cut or named. Printed
are medians. `bench/collectives.py --places loopback --ranks 4` has the same collectives by Gloo and by Poseidon.
"""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

RANKS = 4
SIZE = 16 << 20
PIECE = 256 << 10
ROUNDS = 15


def receive(connection: socket.socket, into: memoryview) -> None:
    while into:
        into = into[connection.recv_into(into) :]


def in_threads(tasks: list[Callable[[], Any]]) -> None:
    threads = [threading.Thread(target=task) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def connections(rank: int, ports: list[int], meet: Callable[[], Any]) -> dict[int, socket.socket]:
    """A connection to each other rank."""
    found = {}
    with socket.create_server(("127.0.0.1", ports[rank])) as listener:
        meet()
        for other in range(rank):
            found[other] = socket.create_connection(("127.0.0.1", ports[other]))
            found[other].sendall(bytes([rank]))
        for _ in range(RANKS - 1 - rank):
            connection, _ = listener.accept()
            found[connection.recv(1)[0]] = connection
    for connection in found.values():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


def all_to_all(others: dict[int, socket.socket], source: memoryview, target: memoryview) -> None:
    share = SIZE // RANKS
    parts = {other: slice(other * share, (other + 1) * share) for other in others}
    sends = [partial(one.sendall, source[parts[other]]) for other, one in others.items()]
    receives = [partial(receive, one, target[parts[other]]) for other, one in others.items()]
    in_threads([*sends, *receives])


def broadcast(rank: int, others: dict[int, socket.socket], source: memoryview, target: memoryview) -> None:
    share = SIZE // (RANKS - 1)
    parts = {other: slice((other - 1) * share, other * share) for other in range(1, RANKS)}
    if rank == 0:
        in_threads([partial(one.sendall, source[parts[other]]) for other, one in others.items()])
        return

    def pass_on() -> None:
        own = target[parts[rank]]
        for begin in range(0, share, PIECE):
            piece = own[begin : begin + PIECE]
            receive(others[0], piece)
            for other, one in others.items():
                if other:
                    one.sendall(piece)

    receives = [partial(receive, one, target[parts[other]]) for other, one in others.items() if other]
    in_threads([pass_on, *receives])


def work(rank: int, ports: list[int], barrier: Any, answers: Any) -> None:
    """Measures as one rank. The first one puts its medians into `answers`."""
    others = connections(rank, ports, barrier.wait)
    source, target = memoryview(bytearray(SIZE)), memoryview(bytearray(SIZE))
    calls: dict[str, Callable[[], None]] = {
        "all_to_all_single": lambda: all_to_all(others, source, target),
        "broadcast": lambda: broadcast(rank, others, source, target),
    }
    for name, call in calls.items():
        call()
        seconds = []
        for _ in range(ROUNDS):
            barrier.wait()
            begun = time.perf_counter()
            call()
            barrier.wait()
            seconds.append(time.perf_counter() - begun)
        if rank == 0:
            answers.put((name, statistics.median(seconds)))


def main() -> None:
    from poseidon.launch import free_port

    ports = [free_port() for _ in range(RANKS)]
    barrier = multiprocessing.Barrier(RANKS)
    answers: Any = multiprocessing.Queue()
    processes = [multiprocessing.Process(target=work, args=(rank, ports, barrier, answers)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for _ in range(2):
        name, seconds = answers.get()
        print(f"{name} of {SIZE:,} bytes, {RANKS} ranks: {1e6 * seconds:,.0f} µs")
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
