"""Datagrams between two machines tell what TCP hides: code points, the largest packet, the clocks, a firewall."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

_PMTUDISC_PROBE = 3  # of linux/in.h
_QUESTION = struct.Struct("!16sI")  # token, number
_ANSWER = struct.Struct("!16sIBd")  # token, number, the TOS byte that came, the time of day
_MOST_BYTES = 65535
_PATIENCE_S = 0.5
_TRIES = 5


@dataclass(frozen=True)
class _Protocol:
    """What a version of IP calls the same things. `headers_bytes`: its own and UDP's."""

    family: socket.AddressFamily
    level: int
    receive_mark: int
    mark: int
    mtu_discover: int  # Python has no name for it
    headers_bytes: int

    def open(self) -> socket.socket:
        return socket.socket(self.family, socket.SOCK_DGRAM)


_IPV4 = _Protocol(socket.AF_INET, socket.IPPROTO_IP, socket.IP_RECVTOS, socket.IP_TOS, 10, 28)
_IPV6 = _Protocol(socket.AF_INET6, socket.IPPROTO_IPV6, socket.IPV6_RECVTCLASS, socket.IPV6_TCLASS, 23, 48)


def _protocol_of(address: str) -> _Protocol:
    return _IPV6 if ":" in address else _IPV4


@dataclass(frozen=True)
class Answer:
    """`dscp`: the code point that arrived. `skew_s`: how far the other clock is ahead."""

    dscp: int
    round_trip_s: float
    skew_s: float


class Responder:
    """Answers the questions of machines that know `token`, on a thread of its own, until it is closed."""

    def __init__(self, address: str, token: bytes, clock: Callable[[], float] = time.time) -> None:
        self._token, self._clock = token, clock
        self._protocol = _protocol_of(address)
        self._socket = self._protocol.open()
        self._socket.bind((address, 0))
        self._socket.setsockopt(self._protocol.level, self._protocol.receive_mark, 1)
        self._socket.settimeout(_PATIENCE_S)
        self.port = int(self._socket.getsockname()[1])
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._closing.is_set():
            with contextlib.suppress(OSError):  # nothing has come, or what was sent before has found nobody
                question, about, _, sender = self._socket.recvmsg(_MOST_BYTES, 64)
                if question[:16] != self._token or len(question) < _QUESTION.size:
                    continue
                _, number = _QUESTION.unpack_from(question)
                tos = next((data[0] for _, kind, data in about if kind == self._protocol.mark), 0)
                self._socket.sendto(_ANSWER.pack(self._token, number, tos, self._clock()), sender)

    def close(self) -> None:
        """Waits for the thread."""
        self._closing.set()
        self._thread.join()
        self._socket.close()


def ask(address: tuple[str, int], token: bytes, dscp: int = 0, packet_bytes: int = 0) -> Answer | None:
    """The best of some answers; None if none comes. `packet_bytes`: of a packet that must not be split."""
    protocol = _protocol_of(address[0])
    size = max(_QUESTION.size, packet_bytes - protocol.headers_bytes)
    best: Answer | None = None
    with protocol.open() as one:
        one.setsockopt(protocol.level, protocol.mark, dscp << 2)
        one.setsockopt(protocol.level, protocol.mtu_discover, _PMTUDISC_PROBE)
        one.settimeout(_PATIENCE_S)
        one.connect(address)
        for number in range(_TRIES):
            with contextlib.suppress(OSError):
                sent = time.time()
                one.send(_QUESTION.pack(token, number).ljust(size, b"\0"))
                answered, tos, there = _receive(one, token, number)
                trip = answered - sent
                if best is None or trip < best.round_trip_s:
                    best = Answer(tos >> 2, trip, there - (sent + answered) / 2)
    return best


def _receive(one: socket.socket, token: bytes, number: int) -> tuple[float, int, float]:
    """When the answer came, and what it says. Raises OSError if it does not come."""
    while True:
        data = one.recv(_ANSWER.size)
        now = time.time()
        if len(data) == _ANSWER.size:
            got, which, tos, there = _ANSWER.unpack(data)
            if (got, which) == (token, number):
                return now, tos, there
