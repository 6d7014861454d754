"""Makes the engine of a method. Holds those of Poseidon and Gloo."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta

from poseidon.bench.exchange.arrays import Arrays
from poseidon.bench.exchange.engine import BenchmarkJob, Engine
from poseidon.bench.exchange.methods import Library
from poseidon.bench.exchange.mpi_engine import MpiEngine
from poseidon.bench.exchange.plain_copy import CopyEngine
from poseidon.bench.hosts.server import settings_on
from poseidon.options import AUTO


class PoseidonEngine(Engine):
    """Starts every tensor in backward order, then waits for all. The mean comes back, as in training."""

    def __init__(self, job: BenchmarkJob, rank: int, arrays: Arrays) -> None:
        super().__init__(job, rank, arrays)
        self.divisor = len(job.places)

    def connect(self) -> None:
        from poseidon._core import Arrays as CoreArrays
        from poseidon._core import Client, Layer

        job = self._job
        settings = settings_on(
            job.places[self._rank],
            {**job.places[self._rank].options, **job.method.options},
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
    """Reduces all tensors as one, on the first port. One all-reduce per tensor would be slower."""

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


def make_engine(job: BenchmarkJob, rank: int, arrays: Arrays) -> Engine:
    """Returns this rank's engine for the job's method."""
    return _ENGINES[job.method.library](job, rank, arrays)


_ENGINES: Mapping[Library, type[Engine]] = {
    "poseidon": PoseidonEngine,
    "gloo": GlooEngine,
    "mpi": MpiEngine,
    "tcp-copy": CopyEngine,
    "tcp-stream": CopyEngine,
}
