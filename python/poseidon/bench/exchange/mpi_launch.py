"""The processes of MPI as a peer: one per host, started by MPICH's own launcher.

`python -m poseidon.bench.exchange.mpi_launch SOCKET` is such a process. It takes its orders from the benchmark over a
Unix socket, which reaches across network namespaces.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import IO, Any

from poseidon.bench.exchange.engine import BenchmarkJob
from poseidon.bench.exchange.engines import MPI_LAUNCHER
from poseidon.bench.exchange.host import ExchangeHost
from poseidon.bench.hosts.fleet import Fleet, Place, answer_calls
from poseidon.errors import Unreachable

_START_SECONDS = 60.0
_STOP_SECONDS = 5.0


@contextmanager
def start_mpi_fleet(places: Sequence[Place], job: BenchmarkJob) -> Iterator[Fleet]:
    """A fleet of `ExchangeHost`s in processes that MPICH started, one per place. Raises Unreachable if they do not."""
    connections: list[Connection] = []
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        path = str(Path(folder) / "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(len(places))
            launcher = subprocess.Popen(
                _command(places, path),
                env={**os.environ, **_tcp_only(places[0].interface)},
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
            )
            try:
                connections += _accept(listener, len(places), launcher, errors)
                for connection in connections:
                    connection.send(job)
                yield Fleet([], connections)
            finally:
                for connection in connections:
                    connection.close()
                _end(launcher)


def _command(places: Sequence[Place], path: str) -> list[str]:
    """One process per host. `ip netns exec` also shows each its own /sys, where MPI looks for its devices."""
    command = [MPI_LAUNCHER, "-launcher", "fork"]
    for place in places:
        enter = [] if place.namespace is None else ["ip", "netns", "exec", place.namespace]
        command += [":"] if len(command) > 3 else []
        command += ["-n", "1", *enter, sys.executable, "-m", "poseidon.bench.exchange.mpi_launch", path]
    return command


def _tcp_only(interface: str) -> dict[str, str]:
    """Variables that keep MPICH from shared memory between hosts, for its builds on UCX and on libfabric."""
    return {
        "MPIR_CVAR_NOLOCAL": "1",
        "UCX_TLS": "tcp,self",
        "UCX_NET_DEVICES": interface,
        "UCX_LOG_LEVEL": "error",
        "FI_PROVIDER": "tcp",
        "FI_TCP_IFACE": interface,
    }


def _accept(listener: socket.socket, count: int, launcher: subprocess.Popen[Any], errors: IO[str]) -> list[Connection]:
    """Connections of all ranks, in rank order."""
    listener.settimeout(0.5)
    by_rank: dict[int, Connection] = {}
    deadline = time.monotonic() + _START_SECONDS
    while len(by_rank) < count:
        try:
            accepted, _ = listener.accept()
        except TimeoutError:
            if launcher.poll() is None and time.monotonic() < deadline:
                continue
            errors.seek(0)
            raise Unreachable(f"MPI did not start: {errors.read()[-2000:].strip() or 'it says nothing'}") from None
        accepted.setblocking(True)
        connection = Connection(accepted.detach())
        by_rank[connection.recv()] = connection
    return [by_rank[rank] for rank in range(count)]


def _end(launcher: subprocess.Popen[Any]) -> None:
    for stop in (lambda: None, launcher.terminate, launcher.kill):
        stop()
        try:
            launcher.wait(_STOP_SECONDS)
            return
        except subprocess.TimeoutExpired:
            continue


def _serve(path: str) -> None:
    connection = Client(path, "AF_UNIX")
    rank = int(os.environ["PMI_RANK"])
    connection.send(rank)
    job = connection.recv()
    answer_calls(connection, lambda: ExchangeHost(job, rank))


if __name__ == "__main__":
    _serve(sys.argv[1])
