"""Checks of the network between the machines of a job. They are collective: every worker calls `check_pairs`.

Datagrams between two machines tell what TCP hides: code points, the largest packet, the clocks, a firewall.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from poseidon.check.finding import Finding
from poseidon.check.interfaces import Interface
from poseidon.exchange import Exchange, connect
from poseidon.racks.grouping import Rates
from poseidon.racks.machines import Machines, find_machines, make_token, rates_between, share_rows
from poseidon.rates import rate_text

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
        with contextlib.suppress(OSError), self._protocol.open() as one:
            one.sendto(b"", self._socket.getsockname())  # so that it looks at once
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


_MARK = 46  # the code point of the most urgent class
_MOST_SKEW_S = 0.1
_CERTAIN_S = 2.0
_SLOW = 0.7  # of the median rate, or of the way back

# What one machine learns about another.
ANSWERS, MARKED, LARGE, SKEW_S = range(4)


def check_pairs(address: str, interface: Interface | None, seconds: float) -> list[Finding]:
    """What is wrong between machines, the same on every worker. Raises PoseidonError: they do not find each other."""
    mtu = interface.mtu if interface is not None else 0
    with connect(reduce_by_host="off") as exchange:
        token = make_token(exchange)
        with contextlib.closing(Responder(address, token)) as responder:
            machines = find_machines(exchange, "responders", address, responder.port)
            exchange.barrier()
            about, mtus = _ask_all(machines, token, mtu)
            share_rows(exchange, "answers", about)
            share_rows(exchange, "mtus", mtus)
        findings = list(judge_answers(machines.addresses, about, [int(one) for one in mtus]))
        if about[..., ANSWERS].sum() == len(mtus) * (len(mtus) - 1):
            findings += _check_rates(exchange, address, token, seconds)
        return findings


def _ask_all(machines: Machines, token: bytes, mtu: int) -> tuple[np.ndarray, np.ndarray]:
    """What this machine learns about each, in its own row."""
    count = len(machines.places)
    about, mtus = np.zeros((count, count, 4)), np.zeros(count)
    if machines.own is None:
        return about, mtus
    mtus[machines.own] = mtu
    for other, place in enumerate(machines.places):
        answer = ask(place, token, _MARK) if other != machines.own else None
        if answer is not None:
            large = mtu == 0 or ask(place, token, packet_bytes=mtu) is not None
            about[machines.own, other] = (1, answer.dscp == _MARK, large, answer.skew_s)
    return about, mtus


def _check_rates(exchange: Exchange, address: str, token: bytes, seconds: float) -> Iterator[Finding]:
    """Looks longer before it finds anything: in a moment one rate is below the others by chance."""
    hosts, rates = rates_between(exchange, address, token, seconds)
    if seconds < _CERTAIN_S and any(judge_rates(hosts, rates)):
        hosts, rates = rates_between(exchange, address, token, _CERTAIN_S, turn=2)
    return judge_rates(hosts, rates)


def allow(sender: str) -> str:
    """The command that lets in what this machine, an address or a name, sends."""
    return f"{'ip6tables' if ':' in sender else 'iptables'} -I INPUT -s {sender} -j ACCEPT"


def judge_answers(hosts: Sequence[str], about: np.ndarray, mtus: Sequence[int]) -> Iterator[Finding]:
    """One finding for each kind, about the first pair that shows it and how many others do."""
    pairs = [(here, there) for here in range(len(hosts)) for there in range(len(hosts)) if here != there]
    silent = [pair for pair in pairs if not about[pair][ANSWERS]]
    if silent:
        yield Finding(
            "firewall",
            f"no datagram {_told(hosts, silent)} is answered",
            f"{allow(hosts[silent[0][0]])}   # on {hosts[silent[0][1]]}",
        )
    answered = [pair for pair in pairs if about[pair][ANSWERS]]
    if stripped := [pair for pair in answered if not about[pair][MARKED]]:
        yield Finding(
            "DSCP",
            f"the network takes the mark of urgency (DSCP {_MARK}) off packets {_told(hosts, stripped)}",
            "trust DSCP at the switches' ports, or let them be: export POSEIDON_PRIORITY_CLASSES=1",
        )
    smallest = min(mtus)
    if len(set(mtus)) > 1:
        names = ", ".join(f"{host} {mtu}" for host, mtu in zip(hosts, mtus, strict=True))
        yield Finding(
            "MTU",
            f"the machines' largest packets differ: {names}",
            f"ip link set dev INTERFACE mtu {smallest}   # on all, or raise the others",
        )
    elif cut := [pair for pair in answered if not about[pair][LARGE]]:
        yield Finding(
            "MTU",
            f"packets of {smallest} bytes, the interface's MTU, get lost {_told(hosts, cut)}",
            "ip link set dev INTERFACE mtu 1500   # or raise the MTU of the switches between",
        )
    if skewed := [pair for pair in answered if pair[0] < pair[1] and abs(about[pair][SKEW_S]) > _MOST_SKEW_S]:
        here, there = max(skewed, key=lambda pair: abs(about[pair][SKEW_S]))
        yield Finding(
            "clocks",
            f"the clocks of {hosts[here]} and {hosts[there]} differ by {abs(about[here, there][SKEW_S]):.2f} s, so "
            "their logs cannot be compared",
            "timedatectl set-ntp true",
        )


def judge_rates(hosts: Sequence[str], rates: Rates) -> Iterator[Finding]:
    """`rates[to][from]`, while all send to all."""
    pairs = [(to, sender) for to in range(len(hosts)) for sender in range(len(hosts)) if to != sender]
    median = float(np.median([rates[to][sender] for to, sender in pairs]))
    to, sender = min(pairs, key=lambda pair: rates[pair[0]][pair[1]])
    slowest, back = rates[to][sender], rates[sender][to]
    told = f"{hosts[sender]} sends {hosts[to]} {rate_text(slowest)}"
    mend = f"ethtool INTERFACE   # on both: speed, duplex; then change cable or port, or leave {hosts[sender]} out"
    if slowest < _SLOW * back:
        yield Finding("asymmetric pair", f"{told}, and gets {rate_text(back)} back", mend)
    elif slowest < _SLOW * median:
        yield Finding("slow pair", f"{told}, while half of the pairs have {rate_text(median)} or more", mend)


def _told(hosts: Sequence[str], pairs: Sequence[tuple[int, int]]) -> str:
    here, there = pairs[0]
    more = f" and between {len(pairs) - 1} more pairs" if len(pairs) > 1 else ""
    return f"from {hosts[here]} to {hosts[there]}{more}"
