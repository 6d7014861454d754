"""Measures the rates between the machines of a job. It is collective: every worker calls it."""

from __future__ import annotations

import contextlib

import numpy as np

from poseidon.exchange import Exchange, connect
from poseidon.options import resolve
from poseidon.racks.grouping import Rates
from poseidon.racks.machines import find_machines, listening_address, make_token, share_rows
from poseidon.racks.traffic import Mesh


def measure_rates(seconds: float) -> tuple[int, list[str], Rates]:
    """Sends between all machines for `seconds`. Returns this worker's rank, the machines' addresses, and their rates.

    The place in the job comes from the environment, as for training. The first worker of each machine takes part.
    Raises PoseidonError: a machine cannot be reached, or there is only one.
    """
    address = listening_address(resolve())
    with connect(reduce_by_host="off") as exchange:
        return exchange.rank, *rates_between(exchange, address, make_token(exchange), seconds)


def rates_between(exchange: Exchange, address: str, token: bytes, seconds: float) -> tuple[list[str], Rates]:
    """The same within an exchange whose workers have a token. `address` is that of this machine."""
    with contextlib.closing(Mesh.listen(address, token)) as mesh:
        machines = find_machines(exchange, "senders", address, mesh.port)
        count = len(machines.places)
        if machines.own is not None:
            mesh.connect(machines.own, machines.places)
        exchange.barrier()
        rates = np.zeros((count, count))
        if machines.own is not None:
            rates[machines.own] = mesh.measure(count, seconds)
    share_rows(exchange, "rates", rates)
    return machines.addresses, rates.tolist()
