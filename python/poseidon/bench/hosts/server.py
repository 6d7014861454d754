"""Poseidon on a host of a benchmark: its settings there, and a process that is a dedicated server."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from poseidon.bench.hosts.fleet import Fleet, Place, start_fleet
from poseidon.bench.hosts.measures import cpu_seconds, retransmission_timeouts
from poseidon.options import Settings, resolve

START_SECONDS = 120.0  # for processes that are forked and meet


# For benchmarks of the wire itself: how fast bytes move, and not how few there are.
UNCODED = {"coding": "off"}


def settings_on(place: Place, options: Mapping[str, str], **keywords: Any) -> Settings:
    """Returns Poseidon's settings on a host.

    A host with several ports listens on all of them, with equally many server cores on each. `keywords` are more
    arguments of `resolve`. `options` are text and may name interfaces themselves.
    """
    port_count = len(place.interfaces)
    if port_count == 1:
        return resolve(**keywords, **options)
    settings = resolve(**keywords, **{"interfaces": place.interfaces, **options})
    if settings.sources["server_cores"] != "default":
        return settings
    return settings.replace(server_cores=port_count * math.ceil(max(1, settings.server_cores) / port_count))


class ServerHost:
    """A dedicated server. It serves from the moment when it is built."""

    def __init__(self, place: Place, options: Mapping[str, str], server_count: int, timeout_seconds: float) -> None:
        """Starts the server. `server_count` servers share this machine's cores."""
        from poseidon._core import Server

        settings = settings_on(
            place,
            {"interfaces": ",".join(place.interfaces), **options},
            rank=0,
            world_size=server_count,
            local_rank=0,
            local_world_size=server_count,
            master_addr="127.0.0.1",
            master_port=1,  # unused: the workers come to the servers
            timeout=timeout_seconds,
        )
        self._server = Server.listen(settings.core(), 0)

    def port(self) -> int:
        """Returns the port on which its first core listens, at its host's first address."""
        return int(self._server.address.rpartition(":")[2])

    def counted(self) -> tuple[float, int]:
        """User and system time of the process so far, and how often TCP has waited for a timer on this host."""
        return cpu_seconds(), retransmission_timeouts()

    def close(self) -> None:
        """Stops serving."""
        self._server.shutdown()


def start_servers(
    places: Sequence[Place], options: Mapping[str, str], timeout_seconds: float, stack: ExitStack
) -> tuple[Fleet, tuple[str, ...]]:
    """Starts a dedicated server in each place, until `stack` ends. Returns them and their addresses."""
    fleet = stack.enter_context(
        start_fleet(places, lambda rank: ServerHost(places[rank], options, len(places), timeout_seconds))
    )
    ports = fleet.call_same("port", timeout_seconds=START_SECONDS)
    return fleet, tuple(f"{place.address}:{port}" for place, port in zip(places, ports, strict=True))
