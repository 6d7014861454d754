"""The machines of a job, as its workers tell each other, and the rates between all of them.

All of it is collective: every worker calls it.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

import numpy as np

from poseidon.errors import InvalidArgument
from poseidon.exchange import Exchange, connect
from poseidon.options import Settings, resolve
from poseidon.options.interfaces import is_address
from poseidon.racks.grouping import Rates
from poseidon.racks.traffic import Mesh, own_address

_ADDRESS_BYTES = 64
_TOKEN_BYTES = 16


@dataclass(frozen=True)
class Machines:
    """`places`: the address of each machine, and the port of its first worker. `own`: None for the other workers."""

    places: list[tuple[str, int]]
    own: int | None

    @property
    def addresses(self) -> list[str]:
        """One of each machine."""
        return [address for address, _ in self.places]


def listening_address(settings: Settings) -> str:
    """The address of this machine in the job's network."""
    named = settings.interfaces[0] if settings.interfaces else ""
    return named if is_address(named) else own_address(settings.master_addr, settings.master_port)


def make_token(exchange: Exchange) -> bytes:
    """16 bytes that only the workers of this job know."""
    return _gather(exchange, "token", os.urandom(_TOKEN_BYTES) if exchange.rank == 0 else b"", _TOKEN_BYTES)[0]


def find_machines(exchange: Exchange, key: str, address: str, port: int) -> Machines:
    """The first worker of each machine takes part, at the port that it gives. Raises InvalidArgument if one is all.

    `key`: of the exchange, not used before.
    """
    texts = _gather(exchange, key, f"{address} {port}".encode(), _ADDRESS_BYTES)
    places = [text.rstrip(b"\0").decode().split() for text in texts]
    hosts = list(dict.fromkeys(host for host, _ in places))
    if len(hosts) < 2:
        raise InvalidArgument("all workers are on one machine: start one on each machine of the cluster")
    firsts = [next(rank for rank, place in enumerate(places) if place[0] == host) for host in hosts]
    own = firsts.index(exchange.rank) if exchange.rank in firsts else None
    return Machines([(places[rank][0], int(places[rank][1])) for rank in firsts], own)


def share_rows(exchange: Exchange, key: str, table: np.ndarray) -> None:
    """Everyone gets the rows of all: each has filled its own and left zeros elsewhere. Ends when all have them."""
    _add_up(exchange, key, table)
    exchange.barrier()


def _add_up(exchange: Exchange, key: str, table: np.ndarray) -> None:
    exchange.declare({key: table})
    exchange.push_pull(key, table, out=table, average=False)


def _gather(exchange: Exchange, key: str, own: bytes, size_bytes: int) -> list[bytes]:
    """What every rank gives, by rank, filled up with zeros."""
    rows = np.zeros((exchange.world_size, size_bytes), np.uint8)
    rows[exchange.rank, : len(own)] = np.frombuffer(own, np.uint8)
    _add_up(exchange, key, rows)
    return [row.tobytes() for row in rows]


def measure_rates(seconds: float) -> tuple[int, list[str], Rates]:
    """Sends between all machines for `seconds`. Returns this worker's rank, the machines' addresses, and their rates.

    The place in the job comes from the environment, as for training. The first worker of each machine takes part.
    Raises PoseidonError: a machine cannot be reached, or there is only one.
    """
    address = listening_address(resolve())
    with connect(reduce_by_host="off") as exchange:
        return exchange.rank, *rates_between(exchange, address, make_token(exchange), seconds)


def rates_between(
    exchange: Exchange, address: str, token: bytes, seconds: float, turn: int = 1
) -> tuple[list[str], Rates]:
    """The same within an exchange whose workers have a token. `address` is that of this machine.

    `turn`: another number each time.
    """
    with contextlib.closing(Mesh.listen(address, token)) as mesh:
        machines = find_machines(exchange, f"senders {turn}", address, mesh.port)
        count = len(machines.places)
        if machines.own is not None:
            mesh.connect(machines.own, machines.places)
        exchange.barrier()
        rates = np.zeros((count, count))
        if machines.own is not None:
            rates[machines.own] = mesh.measure(count, seconds)
    share_rows(exchange, f"rates {turn}", rates)
    return machines.addresses, rates.tolist()
