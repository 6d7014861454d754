"""How one host takes part in an exchange: what every method offers, Poseidon and Gloo."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from poseidon.bench.exchange_methods import ExchangeMethod
from poseidon.bench.fleet import Place
from poseidon.options import AUTO, Settings, resolve

if TYPE_CHECKING:
    from poseidon.bench.exchange_arrays import Arrays


@dataclass(frozen=True)
class Job:
    """What every worker of a round is told.

    places: of the workers, by rank. ports: one per worker, free on its host. servers: "host:port" of dedicated ones.
    copy_bytes: what a plain copy sends in a step.
    """

    method: ExchangeMethod
    tensors: tuple[tuple[str, int], ...]
    places: Sequence[Place]
    ports: Sequence[int]
    copy_bytes: int
    timeout_seconds: float
    servers: tuple[str, ...] = ()


class Engine(ABC):
    """One worker's end of an exchange. A step turns the arrays of all workers into their sum over `divisor`.

    divisor: 0 for an engine that leaves the arrays alone.
    """

    divisor: int

    @abstractmethod
    def connect(self) -> None:
        """Meets the other workers."""

    @abstractmethod
    def step(self) -> None:
        """One exchange of all arrays, complete when it returns."""

    @abstractmethod
    def close(self) -> None:
        """Ends the connections."""


def settings_on(place: Place, options: Mapping[str, str], **keywords: Any) -> Settings:
    """Poseidon's settings on a host. It listens on all of several ports, with equally many server cores on each.

    keywords: of `resolve`, beside `options`, which are text and may name interfaces themselves.
    """
    port_count = len(place.interfaces)
    if port_count == 1:
        return resolve(**keywords, **options)
    settings = resolve(**keywords, **{"interfaces": place.interfaces, **options})
    if settings.sources["server_cores"] != "default":
        return settings
    return replace(settings, server_cores=port_count * math.ceil(max(1, settings.server_cores) / port_count))


class PoseidonEngine(Engine):
    """Starts every tensor in backward order, then waits for all. The mean comes back, as in training."""

    def __init__(self, job: Job, rank: int, arrays: Arrays) -> None:
        self._job = job
        self._rank = rank
        self._arrays = arrays
        self.divisor = len(job.places)

    def connect(self) -> None:
        from poseidon._core import Arrays as CoreArrays
        from poseidon._core import Client, Layer

        job = self._job
        settings = settings_on(
            job.places[self._rank],
            job.method.options,
            rank=self._rank,
            world_size=len(job.places),
            local_rank=self._rank,
            local_world_size=len(job.places),  # they share this machine's cores
            master_addr=job.places[0].address,
            master_port=job.ports[0],
            servers=job.servers,
            timeout=job.timeout_seconds,
        )
        self._client = Client.connect(settings.core())
        if settings.chunk_bytes == AUTO:
            self._client.choose_chunk_bytes()
        self._backward = CoreArrays(self._arrays.tensors[::-1])
        layers = [Layer(name, "float32", count, scheme="ps") for name, count in reversed(job.tensors)]
        self._first, _ = self._client.add_layers(layers)

    def step(self) -> None:
        self._client.start_all(self._first, self._backward, self.divisor)
        self._client.wait_all()

    def close(self) -> None:
        self._client.shutdown()


class GlooEngine(Engine):
    """All-reduce of all tensors as one, on the first port: per tensor it would be slower."""

    divisor = 1

    def __init__(self, job: Job, rank: int, arrays: Arrays) -> None:
        self._job = job
        self._rank = rank
        self._arrays = arrays

    def connect(self) -> None:
        import torch
        import torch.distributed as dist

        job = self._job
        torch.set_num_threads(1)  # the hosts of a testbed share this machine's cores
        os.environ["GLOO_SOCKET_IFNAME"] = job.places[self._rank].interface
        store = dist.TCPStore(job.places[0].address, job.ports[0], len(job.places), is_master=self._rank == 0)
        limit = timedelta(seconds=job.timeout_seconds)
        dist.init_process_group("gloo", store=store, rank=self._rank, world_size=len(job.places), timeout=limit)
        self._flat = torch.from_numpy(self._arrays.flat)
        self._all_reduce, self._leave = dist.all_reduce, dist.destroy_process_group

    def step(self) -> None:
        self._all_reduce(self._flat)

    def close(self) -> None:
        self._leave()


def make_engine(job: Job, rank: int, arrays: Arrays) -> Engine:
    """The engine of the job's method."""
    library = job.method.library
    if library == "poseidon":
        return PoseidonEngine(job, rank, arrays)
    if library == "gloo":
        return GlooEngine(job, rank, arrays)
    if library == "mpi":
        from poseidon.bench.mpi import MpiEngine  # which also starts the processes of such jobs

        return MpiEngine(arrays)
    from poseidon.bench.exchange_copy import CopyEngine

    return CopyEngine(job, rank, arrays, cached=library == "tcp-stream")
