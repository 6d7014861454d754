"""Measures the rates between the machines of a job. It is collective: every worker calls it."""

from __future__ import annotations

import contextlib
import os
import socket

import numpy as np

from poseidon.errors import InvalidArgument
from poseidon.exchange import Exchange, connect
from poseidon.options import resolve
from poseidon.racks.grouping import Rates
from poseidon.racks.traffic import Mesh, own_address

_ADDRESS_BYTES = 64
_TOKEN_BYTES = 16


def measure_rates(seconds: float) -> tuple[int, list[str], Rates]:
    """Sends between all machines for `seconds`. Returns this worker's rank, the machines' addresses, and their rates.

    The place in the job comes from the environment, as for training. The first worker of each machine takes part.
    Raises PoseidonError: a machine cannot be reached, or there is only one.
    """
    settings = resolve()
    named = settings.interfaces[0] if settings.interfaces else ""
    address = named if _is_address(named) else own_address(settings.master_addr, settings.master_port)
    with connect(reduce_by_host="off") as exchange:
        token = _gather(exchange, "token", os.urandom(_TOKEN_BYTES) if exchange.rank == 0 else b"", _TOKEN_BYTES)[0]
        with contextlib.closing(Mesh.listen(address, token)) as mesh:
            texts = _gather(exchange, "addresses", f"{address} {mesh.port}".encode(), _ADDRESS_BYTES)
            places = [text.rstrip(b"\0").decode().split() for text in texts]
            hosts = list(dict.fromkeys(host for host, _ in places))
            if len(hosts) < 2:
                raise InvalidArgument("all workers are on one machine: start one on each machine of the cluster")
            firsts = [next(rank for rank, place in enumerate(places) if place[0] == host) for host in hosts]
            measures = exchange.rank in firsts
            if measures:
                own = firsts.index(exchange.rank)
                mesh.connect(own, [(places[rank][0], int(places[rank][1])) for rank in firsts])
            exchange.barrier()
            rates = np.zeros((len(hosts), len(hosts)))
            if measures:
                rates[own] = mesh.measure(len(hosts), seconds)
        exchange.declare({"rates": rates})
        exchange.push_pull("rates", rates, out=rates, average=False)
        exchange.barrier()  # the rates have come from all
        return exchange.rank, hosts, rates.tolist()


def _gather(exchange: Exchange, key: str, own: bytes, size_bytes: int) -> list[bytes]:
    """What every rank gives, by rank, filled up with zeros."""
    rows = np.zeros((exchange.world_size, size_bytes), np.uint8)
    rows[exchange.rank, : len(own)] = np.frombuffer(own, np.uint8)
    exchange.declare({key: rows})
    exchange.push_pull(key, rows, out=rows, average=False)
    return [row.tobytes() for row in rows]


def _is_address(text: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            socket.inet_pton(family, text)
            return True
    return False
