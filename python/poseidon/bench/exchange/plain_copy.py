"""A plain TCP copy as a peer: what an application can get out of the hosts' ports."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from poseidon.bench.exchange.arrays import Arrays
from poseidon.bench.exchange.engine import BenchmarkJob, Engine
from poseidon.errors import PeerLost

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
