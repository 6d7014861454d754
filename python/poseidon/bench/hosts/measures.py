"""What a host measures: its interface's counters, its processes' time, and how long its steps took."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Counters:
    """Bytes received and sent since some fixed moment."""

    received: int = 0
    sent: int = 0

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(self.received - earlier.received, self.sent - earlier.sent)

    @property
    def total(self) -> int:
        """Bytes in both directions."""
        return self.received + self.sent


def interface_counters(interface: str) -> Counters:
    """Reads the counters of `interface` in the caller's network namespace. They count all protocols and headers.

    Raises ValueError if there is no such interface.
    """
    # Not /sys/class/net: that shows the namespace in which /sys was mounted.
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, fields = line.partition(":")
        if name.strip() == interface:
            values = fields.split()
            return Counters(received=int(values[0]), sent=int(values[8]))
    raise ValueError(f"no network interface {interface!r} here")


def retransmission_timeouts() -> int:
    """How often TCP has waited for a timer to send lost packets again, in the caller's network namespace."""
    names, values = (
        line.split()
        for line in Path("/proc/thread-self/net/netstat").read_text().splitlines()
        if line.startswith("TcpExt:")
    )
    return int(values[names.index("TCPTimeouts")])


def cpu_seconds() -> float:
    """Returns the user and system time of this process, with all its threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def step_seconds(hosts: Sequence[Sequence[float]]) -> list[float]:
    """Returns how long each step of a round took. `hosts` has each host's ends of the steps.

    A step ends when the slowest host has ended it.
    """
    ends = [max(host[index] for host in hosts) for index in range(len(hosts[0]))]
    return [end - start for start, end in pairwise(ends)]
