"""Sends from every machine to every other one at the same time, and measures what arrives."""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from poseidon.errors import PoseidonTimeout

_BLOCK_BYTES = 256 << 10
_GREETING = struct.Struct("!16sI")  # the token of this measurement, the sender's index
_PATIENCE_SECONDS = 30.0
_WARMUP = 0.3  # of the time: until TCP has found its rates


def own_address(towards: str, port: int) -> str:
    """The address of this machine from which packets to that one leave. Sends nothing."""
    family, kind, protocol, _, address = socket.getaddrinfo(towards, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


@dataclass(eq=False)
class _Source:
    """A connection that brings something. `rank` is -1 until its greeting has come."""

    rank: int = -1
    greeting: bytes = b""
    counted_bytes: int = 0


@dataclass
class Mesh:
    """The connections of one machine to all others. Use it on one thread: `connect`, then `measure`, then `close`."""

    token: bytes
    listener: socket.socket
    sources: dict[socket.socket, _Source] = field(default_factory=dict)
    targets: list[socket.socket] = field(default_factory=list)

    @staticmethod
    def listen(address: str, token: bytes) -> Mesh:
        """A mesh that others reach at this address. `token` are 16 bytes that only machines of this job know."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return Mesh(token, socket.create_server((address, 0), family=family, backlog=1024))

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return int(self.listener.getsockname()[1])

    def connect(self, own: int, addresses: Sequence[tuple[str, int]]) -> None:
        """Connects to all others. `own` is this machine's index. Raises PoseidonTimeout if one cannot be reached."""
        for index, address in enumerate(addresses):
            if index == own:
                continue
            try:
                target = socket.create_connection(address, timeout=_PATIENCE_SECONDS)
            except OSError as error:
                raise PoseidonTimeout(
                    f"{address[0]} cannot be reached on port {address[1]} ({error}): open the ports of this network "
                    "between the machines while they are measured"
                ) from None
            target.sendall(_GREETING.pack(self.token, own))
            target.setblocking(False)
            self.targets.append(target)

    def measure(self, count: int, seconds: float) -> list[float]:
        """Sends to all for `seconds`. Returns the bits per second that came from each of `count` machines meanwhile."""
        block, inbox = bytes(_BLOCK_BYTES), bytearray(_BLOCK_BYTES)
        end = time.monotonic() + seconds
        begin = end - (1 - _WARMUP) * seconds
        with selectors.DefaultSelector() as ready:
            self.listener.setblocking(False)
            ready.register(self.listener, selectors.EVENT_READ)
            for target in self.targets:
                ready.register(target, selectors.EVENT_WRITE)
            while (now := time.monotonic()) < end:
                for key, _ in ready.select(end - now):
                    one = key.fileobj
                    assert isinstance(one, socket.socket)
                    if one is self.listener:
                        self._accept(ready)
                    elif one in self.sources:
                        self._receive(one, inbox, ready, counts=now >= begin)
                    elif not _send(one, block):
                        ready.unregister(one)
        rates = [0.0] * count
        for source in self.sources.values():
            if 0 <= source.rank < count:
                rates[source.rank] += source.counted_bytes * 8 / (end - begin)
        return rates

    def _accept(self, ready: selectors.BaseSelector) -> None:
        source, _ = self.listener.accept()
        source.setblocking(False)
        self.sources[source] = _Source()
        ready.register(source, selectors.EVENT_READ)

    def _receive(self, one: socket.socket, inbox: bytearray, ready: selectors.BaseSelector, counts: bool) -> None:
        source = self.sources[one]
        try:
            if source.rank >= 0:
                got = one.recv_into(inbox)
                source.counted_bytes += got if counts else 0
            else:
                piece = one.recv(_GREETING.size - len(source.greeting))
                source.greeting += piece
                got = len(piece)
        except BlockingIOError:
            return
        except OSError:
            got = 0
        if len(source.greeting) == _GREETING.size and source.rank < 0:
            token, rank = _GREETING.unpack(source.greeting)
            source.rank = rank if token == self.token else -1
            got = 0 if token != self.token else got
        if got == 0:  # it has ended, or does not belong to this measurement
            ready.unregister(one)
            one.close()

    def close(self) -> None:
        """Drops what is still on its way."""
        for one in (*self.targets, *self.sources):
            if one.fileno() >= 0:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                one.close()
        self.listener.close()


def _send(target: socket.socket, block: bytes) -> bool:
    """Whether the connection is still open."""
    try:
        target.send(block)
    except BlockingIOError:
        pass
    except OSError:
        return False
    return True
