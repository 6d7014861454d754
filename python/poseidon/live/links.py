"""What the kernel knows of this process's TCP connections."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from poseidon.live.figures import LinkFigures

# In Linux's struct tcp_info (include/uapi/linux/tcp.h): the offset of each, and its form.
_ROUND_TRIP_US = (68, "I")
_RESENT = (100, "I")
_ACKNOWLEDGED_BYTES = (120, "Q")
_BUSY_US = (168, "Q")
_INFO_BYTES = 192
_LEAST_BYTES = 64 << 10  # below that a rate would be one of waiting


@dataclass
class _Link:
    acknowledged: int = 0
    busiest_us: int = 0
    round_trip_us: int = 0
    resent: int = 0

    @property
    def is_known(self) -> bool:
        """Whether enough was sent to know a rate."""
        return self.acknowledged >= _LEAST_BYTES and self.busiest_us > 0


class LinkMeter:
    """Rates between one call of `links` and the next."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[int, int]] = {}  # by connection: bytes and µs so far

    def links(self) -> tuple[LinkFigures, ...]:
        """One for each address to which this process has connections beyond itself."""
        return tuple(_figures(peer, link) for peer, link in sorted(self._since_before().items()))

    def sent(self) -> dict[str, tuple[int, float]]:
        """To each of these addresses: the bytes that were acknowledged, and for how many seconds some were not yet.

        Addresses to which too little was sent for a rate are left out.
        """
        known = {peer: link for peer, link in self._since_before().items() if link.is_known}
        return {peer: (link.acknowledged, link.busiest_us / 1e6) for peer, link in known.items()}

    def _since_before(self) -> dict[str, _Link]:
        links: dict[str, _Link] = {}
        now: dict[str, tuple[int, int]] = {}
        for name, peer, info in _connections():
            acknowledged, busy_us = _value(info, _ACKNOWLEDGED_BYTES), _value(info, _BUSY_US)
            acknowledged_before, busy_before_us = self._before.get(name, (0, 0))
            now[name] = (acknowledged, busy_us)
            link = links.setdefault(peer, _Link())
            link.acknowledged += acknowledged - acknowledged_before
            link.busiest_us = max(link.busiest_us, busy_us - busy_before_us)
            link.round_trip_us = max(link.round_trip_us, _value(info, _ROUND_TRIP_US))
            link.resent += _value(info, _RESENT)
        self._before = now
        return links


def _figures(peer: str, link: _Link) -> LinkFigures:
    rate = link.acknowledged * 8e6 / link.busiest_us if link.is_known else None
    return LinkFigures(peer, rate, link.round_trip_us / 1e6, link.resent)


def _value(info: bytes, place: tuple[int, str]) -> int:
    offset, form = place
    return int(struct.unpack_from(form, info, offset)[0])


def _connections() -> list[tuple[str, str, bytes]]:
    """Of each: a name that no other has, the other end's address, and the kernel's tcp_info."""
    found = []
    for name, connection in _sockets():
        with contextlib.suppress(OSError):  # one that listens
            peer = connection.getpeername()[0]
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
            if len(info) == _INFO_BYTES:
                found.append((name, str(peer), info))
    return found


def own_addresses() -> list[str]:
    """The addresses that connections of this process have on this machine."""
    found = set()
    for _, connection in _sockets():
        with contextlib.suppress(OSError):
            connection.getpeername()
            found.add(str(connection.getsockname()[0]))
    return sorted(found)


def _sockets() -> Iterator[tuple[str, socket.socket]]:
    """This process's sockets of IP, each with a name that no other has. Each is closed when the next is asked for."""
    try:
        texts = os.listdir("/proc/self/fd")
    except OSError:  # no /proc: nothing is known
        return
    for text in texts:
        # It may be closed meanwhile, or be something else.
        with contextlib.suppress(OSError, ValueError):
            name = os.readlink(f"/proc/self/fd/{text}")
            if not name.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(text))) as own:
                if own.family in (socket.AF_INET, socket.AF_INET6):
                    yield name, own
