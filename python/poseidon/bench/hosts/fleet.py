"""One process per host: forked after the imports, moved into its host's network namespace, driven over pipes."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from poseidon.errors import PeerLost, PoseidonError, PoseidonTimeout, Unreachable
from poseidon.testbed import Testbed

_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_STOP_SECONDS = 5.0
_COPY_SECONDS = 1.5
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Place:
    """A host's network namespace (None for this one), the addresses and interfaces of its ports, and its rack, if there
    are several."""

    namespace: str | None
    addresses: tuple[str, ...]
    interfaces: tuple[str, ...]
    rack: str | None = None

    @property
    def address(self) -> str:
        """That of the first port."""
        return self.addresses[0]

    @property
    def interface(self) -> str:
        """That of the first port."""
        return self.interfaces[0]

    @property
    def options(self) -> dict[str, str]:
        """What a worker here tells Poseidon of its place."""
        return {} if self.rack is None else {"rack": self.rack}


LOOPBACK = Place(None, ("127.0.0.1",), ("lo",))


def places_of(testbed: Testbed) -> list[Place]:
    """Returns the hosts of a testbed that is up."""
    layout = testbed.layout
    return [
        Place(
            host.namespace, host.addresses, host.devices, f"rack-{layout.rack_of(index)}" if layout.racks > 1 else None
        )
        for index, host in enumerate(testbed.hosts)
    ]


@contextmanager
def places_on(host_count: int, link: str | None, **testbed: Any) -> Iterator[tuple[list[Place], Testbed | None]]:
    """Brings up the hosts, and gives them and their testbed, which is None on loopback. `testbed` has more arguments
    of `Testbed`."""
    if link is None:
        yield [LOOPBACK] * host_count, None
        return
    with Testbed(host_count, link, **testbed) as hosts:
        yield places_of(hosts), hosts


@contextmanager
def hosts_on(host_count: int, link: str | None, **testbed: Any) -> Iterator[tuple[list[Place], float | None]]:
    """Brings up the hosts and measures plain TCP copies between them. `testbed` has more arguments of `Testbed`.

    Gives the hosts and a rate in bits per second: the slowest of copies from every host to the next, all at once. The
    rate is None on loopback and for one host.
    """
    with places_on(host_count, link, **testbed) as (places, hosts):
        tcp_copy = None
        if hosts is not None and host_count > 1:
            pairs = [(source, (source + 1) % host_count) for source in range(host_count)]
            tcp_copy = min(hosts.copy_rates(pairs, int(hosts.bits_per_second / 8 * _COPY_SECONDS)))
        yield places, tcp_copy


def enter_namespace(namespace: str) -> None:
    """Moves the calling thread, and the threads it starts later, into a network namespace that `ip netns` lists."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(Path("/var/run/netns") / namespace, os.O_RDONLY)
    try:
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise Unreachable(f"cannot enter network namespace {namespace}: {os.strerror(code)}; root is needed")
    finally:
        os.close(descriptor)


def make_barrier(count: int) -> Barrier:
    """A barrier for the processes of a fleet that is started later; it uses no network."""
    return _FORK.Barrier(count)


class Fleet:
    """The running workers. Every call goes to all of them at once and returns their answers in rank order."""

    def __init__(self, processes: list[BaseProcess], connections: list[Connection]) -> None:
        self._processes = processes
        self._connections = connections

    def call(self, name: str, arguments: Sequence[tuple[Any, ...]], timeout_seconds: float) -> list[Any]:
        """Calls method `name` of each worker with its own arguments.

        Raises PoseidonError with a worker's own error, PeerLost if one died, PoseidonTimeout naming who is silent.
        """
        for rank, (connection, values) in enumerate(zip(self._connections, arguments, strict=True)):
            try:
                connection.send((name, values))
            except OSError:
                raise PeerLost(f"the process of host {rank} has ended before {name}") from None
        answers: dict[int, Any] = {}
        while len(answers) < len(self._connections):
            waiting = [rank for rank in range(len(self._connections)) if rank not in answers]
            ready = wait([self._connections[rank] for rank in waiting], timeout_seconds)
            if not ready:
                raise PoseidonTimeout(f"hosts {waiting} gave no answer to {name}")
            for rank in waiting:
                if self._connections[rank] in ready:
                    answers[rank] = self._receive(rank, name)
        return [answers[rank] for rank in range(len(answers))]

    def call_same(self, name: str, *arguments: Any, timeout_seconds: float) -> list[Any]:
        """Does what `call` does, with the same arguments for every worker."""
        return self.call(name, [arguments] * len(self._connections), timeout_seconds)

    def stop(self) -> None:
        """Ends all processes: asks them first, then kills those that have not ended in time."""
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + _STOP_SECONDS
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()

    def _receive(self, rank: int, name: str) -> Any:
        try:
            failed, answer = self._connections[rank].recv()
        except (EOFError, OSError):
            raise PeerLost(f"the process of host {rank} died during {name}") from None
        if failed:
            raise PoseidonError(f"host {rank} failed during {name}:\n{answer}")
        return answer


@contextmanager
def start_fleet(places: Sequence[Place], build: Callable[[int], Any]) -> Iterator[Fleet]:
    """Forks one process per place; each builds its worker with `build(rank)` inside its namespace.

    Import what the workers need, but start no threads, before the call: forked processes share the imports' memory.
    """
    if "torch" in sys.modules:
        import torch._dynamo  # noqa: F401 – a process's first optimizer would, for as long as PyTorch itself takes
    processes: list[BaseProcess] = []
    connections: list[Connection] = []
    fleet = Fleet(processes, connections)
    try:
        for rank, place in enumerate(places):
            ours, theirs = _FORK.Pipe()
            process = _FORK.Process(target=_serve, args=(rank, place, build, theirs, [*connections, ours]))
            process.daemon = True
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        yield fleet
    finally:
        fleet.stop()


def _serve(
    rank: int, place: Place, build: Callable[[int], Any], connection: Connection, inherited: list[Connection]
) -> None:
    """A worker's life: answers calls until the controller closes the pipe."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller gets Ctrl-C and stops the workers
    for other in inherited:
        other.close()  # else a closed pipe would not be seen as closed

    def build_in_place() -> Any:
        if place.namespace is not None:
            enter_namespace(place.namespace)
        return build(rank)

    answer_calls(connection, build_in_place)


def answer_calls(connection: Connection, build: Callable[[], Any]) -> None:
    """The worker's end of a fleet: calls methods of what `build` makes at the first call, until the pipe is closed."""
    worker: Any = None
    while True:
        try:
            name, arguments = connection.recv()
        except (EOFError, OSError):
            return
        try:
            if worker is None:
                worker = build()
            answer = (False, getattr(worker, name)(*arguments))
        except Exception:
            answer = (True, traceback.format_exc())
        try:
            connection.send(answer)
        except OSError:
            return
