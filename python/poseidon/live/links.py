"""What the kernel knows of this process's TCP connections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from poseidon.live.figures import LinkFigures

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
        self._before: dict[int, tuple[int, int]] = {}  # by connection: bytes and µs so far

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
        now: dict[int, tuple[int, int]] = {}
        for one in _connections():
            acknowledged_before, busy_before_us = self._before.get(one.id, (0, 0))
            now[one.id] = (one.acknowledged_bytes, one.busy_us)
            link = links.setdefault(one.peer_address, _Link())
            link.acknowledged += one.acknowledged_bytes - acknowledged_before
            link.busiest_us = max(link.busiest_us, one.busy_us - busy_before_us)
            link.round_trip_us = max(link.round_trip_us, one.round_trip_us)
            link.resent += one.resent_packets
        self._before = now
        return links


def _figures(peer: str, link: _Link) -> LinkFigures:
    rate = link.acknowledged * 8e6 / link.busiest_us if link.is_known else None
    return LinkFigures(peer, rate, link.round_trip_us / 1e6, link.resent)


def own_addresses() -> list[str]:
    """The addresses that connections of this process have on this machine."""
    return sorted({one.own_address for one in _connections()})


def _connections() -> list[Any]:
    """Poseidon's own connections in this process."""
    from poseidon import _core  # here: who only looks at others, as `poseidon top`, starts faster without it

    return _core.connections()
