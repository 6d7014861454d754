"""The engines of the methods: those of Poseidon, Gloo and MPI, and a plain TCP copy."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import shutil
import socket
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from poseidon.bench.exchange.arrays import Arrays
from poseidon.bench.exchange.engine import BenchmarkJob, Engine
from poseidon.bench.exchange.methods import Library
from poseidon.bench.hosts.server import UNCODED, settings_on
from poseidon.errors import PeerLost, PoseidonError
from poseidon.options import AUTO

MPI_LAUNCHER = "mpiexec.hydra"
# Values of the common binary interface of MPICH and its descendants.
_COMM_WORLD, _FLOAT, _SUM, _IN_PLACE = 0x44000000, 0x4C00040A, 0x58000003, -1


def _library() -> str | None:
    return ctypes.util.find_library("mpich")


def missing_mpi() -> str | None:
    """Says why MPI cannot be measured here. Returns None if it can."""
    if shutil.which(MPI_LAUNCHER) is None or _library() is None:
        return f"MPICH is not installed ({MPI_LAUNCHER} and libmpich; on Debian: apt-get install mpich)"
    return None


class MpiEngine(Engine):
    """Calls MPI_Allreduce on all arrays as one buffer. Works only in a process that MPICH's launcher started."""

    def connect(self) -> None:
        self._mpi = ctypes.CDLL(_library())
        self._call(self._mpi.MPI_Init(None, None))

    def step(self) -> None:
        flat = self._arrays.flat
        place, buffer = ctypes.c_void_p(_IN_PLACE), ctypes.c_void_p(flat.ctypes.data)
        self._call(self._mpi.MPI_Allreduce(place, buffer, flat.size, _FLOAT, _SUM, _COMM_WORLD))

    def close(self) -> None:
        self._call(self._mpi.MPI_Finalize())

    @staticmethod
    def _call(code: int) -> None:
        if code != 0:
            raise PoseidonError(f"MPI failed with error class {code}")


_BLOCK_BYTES = 1 << 20


class CopyEngine(Engine):
    """Sends to the next worker while it receives from the one before, on blocking sockets, with a thread per direction.

    Each port of the hosts carries an equal part, all at once. The bytes come from the arrays and go into them, as in
    an exchange. With tcp-stream they come from and go into one short block, which costs no traffic to memory.
    """

    divisor = 0

    def __init__(self, job: BenchmarkJob, rank: int, arrays: Arrays) -> None:
        super().__init__(job, rank, arrays)
        cached = job.method.library == "tcp-stream"
        memory = memoryview(bytearray(_BLOCK_BYTES)) if cached else arrays.flat.data.cast("B")
        self._streams = [_Stream(job, rank, memory, port) for port in range(len(job.places[rank].addresses))]

    def connect(self) -> None:
        for stream in self._streams:
            stream.connect()
        self._others = [*(stream.send for stream in self._streams), *(one.receive for one in self._streams[1:])]
        self._threads = ThreadPoolExecutor(len(self._others))

    def step(self) -> None:
        others = [self._threads.submit(work) for work in self._others]
        self._streams[0].receive()
        for other in others:
            other.result()

    def close(self) -> None:
        self._threads.shutdown()
        for stream in self._streams:
            stream.close()


class _Stream:
    """One port's part of the copy."""

    def __init__(self, job: BenchmarkJob, rank: int, memory: memoryview, port: int) -> None:
        count, port_count = len(job.places), len(job.places[rank].addresses)
        after = (rank + 1) % count
        self._next = (job.places[after].addresses[port], job.ports[after])
        self._timeout_seconds = job.timeout_seconds
        start, end = (len(memory) * bound // port_count for bound in (port, port + 1))
        share_bytes = job.copy_bytes * (port + 1) // port_count - job.copy_bytes * port // port_count
        self._blocks = list(_blocks(memory[start : max(end, start + 1)], share_bytes))
        # Listening from here on: the workers connect only when all of them have been built.
        self._listener = socket.create_server((job.places[rank].addresses[port], job.ports[rank]))

    def connect(self) -> None:
        """Connects to the next worker and accepts the one before."""
        self._out = socket.create_connection(self._next, self._timeout_seconds)
        self._listener.settimeout(self._timeout_seconds)
        self._in, _ = self._listener.accept()
        limit = struct.pack("ll", int(self._timeout_seconds) + 1, 0)
        for connection, option in ((self._out, socket.SO_SNDTIMEO), (self._in, socket.SO_RCVTIMEO)):
            connection.settimeout(None)  # Python's own timeout would poll before each call
            connection.setsockopt(socket.SOL_SOCKET, option, limit)

    def send(self) -> None:
        """Sends one step's bytes to the next worker."""
        for block in self._blocks:
            self._out.sendall(block)

    def receive(self) -> None:
        """Receives one step's bytes from the worker before."""
        for block in self._blocks:
            left = len(block)
            while left > 0:
                count = self._in.recv_into(block[-left:], left, socket.MSG_WAITALL)
                if count == 0:
                    raise PeerLost("the other end of the plain copy has closed")
                left -= count

    def close(self) -> None:
        """Ends the connections."""
        for endpoint in (self._out, self._in, self._listener):
            endpoint.close()


def _blocks(memory: memoryview, byte_count: int) -> Iterator[memoryview]:
    """Parts of `memory`, over and over from its start, that have `byte_count` bytes together."""
    while byte_count > 0:
        for start in range(0, min(len(memory), byte_count), _BLOCK_BYTES):
            yield memory[start : min(start + _BLOCK_BYTES, byte_count)]
        byte_count -= len(memory)


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
            {**UNCODED, **job.places[self._rank].options, **job.method.options},
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
