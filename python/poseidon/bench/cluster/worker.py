"""One machine's part of `poseidon bench cluster`: `python -m poseidon.bench.cluster.worker TASK`."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist

import poseidon.torch  # noqa: F401 - makes the backend known
from poseidon import _core
from poseidon.bench.cluster.network import measure_pairs, measure_sum
from poseidon.bench.cluster.task import MARK, Network, Step, Task
from poseidon.bench.hosts.fleet import Place
from poseidon.bench.training.connections import BUCKET_BYTES
from poseidon.bench.training.host import HostSetup, Round, TrainingHost
from poseidon.bench.training.methods import METHODS, Method, scaled_sizes
from poseidon.check.interfaces import interfaces
from poseidon.launch import free_port
from poseidon.models import model_table, scaled
from poseidon.options import resolve
from poseidon.racks.machines import listening_address

_FIRST_WARM_UPS, _WARM_UPS = 8, 2  # sizes and schemes are tried in the first ones; what overlaps is under way
_DEFAULT_MTU = 1500


class _Cluster:
    """The machines of this run, and what they tell each other. Every method is collective."""

    def __init__(self, timeout_seconds: float) -> None:
        settings = resolve()
        self.rank, self.size = settings.rank, settings.world_size
        self._store = dist.TCPStore(
            settings.master_addr, settings.master_port, self.size, is_master=self.rank == 0, use_libuv=False
        )
        self._timeout_seconds = timeout_seconds
        self.address = listening_address(settings)
        self._number = 0
        found = next((one for one in interfaces() if self.address in one.addresses), None)
        self.mtu = _DEFAULT_MTU if found is None else found.mtu
        interface = "lo" if found is None else found.name
        self.places = [Place(None, (address,), (name,)) for address, name in self.all((self.address, interface))]

    def all(self, value: Any) -> list[Any]:
        """The values of all machines, which JSON knows, by their numbers."""
        self._number += 1
        self._store.set(f"{self._number}-{self.rank}", json.dumps(value))
        return [json.loads(self._store.get(f"{self._number}-{rank}")) for rank in range(self.size)]

    def meet(self) -> None:
        """Returns when all machines have called it."""
        self.all(None)

    def leave(self) -> None:
        """The last call. The first machine, which keeps the store, waits for the others."""
        self._store.set(f"end-{self.rank}", "")
        if self.rank == 0:
            self._store.wait([f"end-{rank}" for rank in range(self.size)])

    def port(self) -> int:
        """A free port of the first machine, the same on all."""
        return int(self.all(free_port())[0])


class _Lockstep:
    """Keeps steps without exchange together, as a barrier of processes does."""

    def __init__(self, cluster: _Cluster) -> None:
        self._cluster = cluster

    def wait(self, _timeout: float, /) -> None:
        """Returns when all machines have called it."""
        self._cluster.meet()


def _network(cluster: _Cluster) -> Network:
    with socket.create_server((cluster.address, 0)) as listener:
        ports = cluster.all(listener.getsockname()[1])
        addresses = [place.address for place in cluster.places]
        rates, trips = measure_pairs(cluster.rank, addresses, ports, listener, cluster.meet)
    found = cluster.all([rates, trips, _core.multiply_adds_per_second(), cluster.mtu])
    # A machine knows what arrives: its row becomes a column. Of two round trips the one that has asked knows it.
    columns = [one[0] for one in found]
    count = range(cluster.size)
    network = Network(
        [[columns[to][source] for to in count] for source in count],
        [[found[min(a, b)][1][max(a, b)] for b in count] for a in count],
        0.0,
        min(one[2] for one in found),
        min(one[3] for one in found),
    )
    os.environ["GLOO_SOCKET_IFNAME"] = cluster.places[cluster.rank].interface
    store = dist.TCPStore(addresses[0], cluster.port(), cluster.size, is_master=cluster.rank == 0)
    dist.init_process_group("gloo", store=store, rank=cluster.rank, world_size=cluster.size)
    group = dist.new_group(backend="poseidon")
    rate = min(cluster.all(measure_sum(network.port_bytes_per_s, group, cluster.size)))
    dist.destroy_process_group()
    return Network(**{**asdict(network), "exchange_bytes_per_s": rate})


def _model(cluster: _Cluster, task: Task, name: str) -> list[Step]:
    """The steps of a model with each method. All use the same memory by turns."""
    whole = model_table(name, task.device)
    table = scaled(whole, task.scale)
    options: dict[str, Any] = {"replica_check": "off"}  # steps without exchange leave all with parameters of their own
    if task.scale > 1:  # the messages that stand for large ones are small, and "auto" would not code them
        options |= {"coding": "on", **scaled_sizes(task.scale)}
    setup = HostSetup(
        table=table,
        unscaled=whole,
        compute_seconds=table.iteration_seconds * task.slower,
        bucket_bytes=max(1, BUCKET_BYTES // task.scale**2),
        timeout_seconds=task.timeout_seconds,
        options=options,
    )
    host = TrainingHost(setup, cluster.places, cluster.rank, cluster.port(), _Lockstep(cluster))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    rounds: dict[str, list[list[Any]]] = {method: [] for method in task.methods}
    # A first round is not counted: memory is new in it, and where machines share cores, each method disturbs the next.
    for number in range(1 + task.round_count):
        for method in task.methods:
            made = _round(host, METHODS[method].scaled(task.scale), cluster, task, number)
            found = cluster.all([made.ends, _payload(made)])
            rounds[method] += [found] if number else []
    host.close()
    return [_step(name, method, found) for method, found in rounds.items()]


def _round(host: TrainingHost, method: Method, cluster: _Cluster, task: Task, number: int) -> Round:
    return host.run_round(method, _WARM_UPS if number else _FIRST_WARM_UPS, task.step_count, cluster.port())


def _payload(made: Round) -> list[int] | None:
    return None if made.payload is None else [made.payload.plain.total, made.payload.sent.total]


def _step(model: str, method: str, rounds: list[list[Any]]) -> Step:
    """`rounds` has a list for each, with the ends of the steps and the bytes of each machine."""
    # Each machine has a clock of its own.
    seconds = [
        mean(steps) for machines in rounds for steps in zip(*(_lengths(ends) for ends, _ in machines), strict=True)
    ]
    counted = [payload for machines in rounds for _, payload in machines if payload is not None]
    plain, sent = (sum(one[place] for one in counted) for place in (0, 1))
    return Step(model, method, median(seconds), seconds, sent / plain if plain else None)


def _lengths(ends: Sequence[float]) -> list[float]:
    return [end - begin for begin, end in pairwise(ends)]


def main() -> None:
    """Measures, and prints what it has found on the first machine."""
    task = Task.of_text(sys.argv[1])
    cluster = _Cluster(task.timeout_seconds)
    network = _network(cluster)
    _tell(cluster, network=asdict(network), cores=os.cpu_count())
    for name in task.models:
        _tell(cluster, steps=[asdict(step) for step in _model(cluster, task, name)])
    cluster.leave()


def _tell(cluster: _Cluster, **found: Any) -> None:
    if cluster.rank == 0:
        print(MARK + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
