"""The cluster that a prediction is for: hosts, their ports, racks, servers."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from poseidon import _core
from poseidon.errors import InvalidArgument
from poseidon.rates import format_rate, parse_rate

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "hosts": ((int,), "a whole number"),
    "link": ((str,), 'a rate such as "10gbit"'),
    "workers_per_host": ((int,), "a whole number"),
    "servers": ((int,), "a whole number"),
    "racks": ((int,), "a whole number"),
    "oversubscription": ((int, float), "a number"),
    "rack_labels": ((bool,), "true or false"),
    "strict_priority": ((bool,), "true or false"),
    "mtu": ((int,), "a whole number of bytes"),
    "latency_ms": ((int, float), "a number of milliseconds"),
    "host_memory": ((int, float), "a number of GB per second"),
    "products": ((int, float), "a number of 10⁹ multiply-adds a second"),
    "slowest": ((int, float), "a number of times"),
    "price": ((int, float), "a number of dollars for a host and hour"),
}


_OTHERWISE_NAMED = ("link", "latency_ms", "host_memory", "products")  # in a ClusterSpec, which has other units


@dataclass(frozen=True)
class Setting:
    """A value and where it was given, such as "--hosts" or "cluster.toml, line 3"."""

    value: Any
    origin: str


CLUSTER_KEY = "poseidon bench cluster"
"""Of the version in the file that `poseidon bench cluster` writes, whose object "cluster" has settings."""


def read_settings(path: Path) -> dict[str, Setting]:
    """The settings of a cluster file, or of what `poseidon bench cluster` has measured.

    Raises InvalidArgument, naming the line, for what is no setting or no value.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = _measured(text) or tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InvalidArgument(f"the cluster file {path} cannot be read: {why}") from None
    given = {}
    for name, value in content.items():
        origin = f"{path}, line {_line_of(name, text)}"
        if name not in _KINDS:
            raise InvalidArgument(f"{origin}: {name!r} is no setting of a cluster: known are {', '.join(_KINDS)}")
        given[name] = Setting(value, origin)
    return given


def _measured(text: str) -> dict[str, Any] | None:
    """The settings of a measured cluster; None for another text."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return None
    settings = found.get("cluster") if CLUSTER_KEY in found else None
    return settings if isinstance(settings, dict) else None


def make_cluster(given: Mapping[str, Setting]) -> ClusterSpec:
    """The cluster of these settings; others have their defaults. Raises InvalidArgument that names what is wrong."""
    for name in ("hosts", "link"):
        if name not in given:
            raise InvalidArgument(f"{name} is missing: give --{name}, or {name} in a cluster file with --cluster")
    for name, setting in given.items():
        kinds, words = _KINDS[name]
        if not isinstance(setting.value, kinds) or (isinstance(setting.value, bool) and bool not in kinds):
            raise InvalidArgument(f"{setting.origin}: {name} is {setting.value!r}: it must be {words}")
    values = {name: setting.value for name, setting in given.items()}
    link, latency_ms, memory, products = (values.pop(name, None) for name in _OTHERWISE_NAMED)
    try:
        rate = parse_rate(link, MOST_RATE)
    except InvalidArgument as error:
        raise InvalidArgument(f"{given['link'].origin}: {error}") from None
    if latency_ms is not None:
        values["latency_s"] = latency_ms / 1e3
    if memory is not None:
        values["memory_bytes_per_s"] = memory * 1e9
    if products is not None:
        values["products_per_s"] = products * 1e9
    try:
        return ClusterSpec(bits_per_second=rate, **values)
    except InvalidCluster as error:
        at_fault = given.get(error.field)
        raise InvalidArgument(f"{at_fault.origin}: {error}" if at_fault else str(error)) from None


def _line_of(name: str, text: str) -> int:
    """The line that sets a top-level name, or opens its table."""
    key = re.escape(name)
    pattern = re.compile(rf"""\s*(\[\[?\s*)?["']?{key}["']?\s*[.=\]]""")
    return next((number for number, line in enumerate(text.splitlines(), 1) if pattern.match(line)), 1)


MOST_WORKERS = 10_000
MOST_RATE = 1_600_000_000_000  # bits per second of a port
MEMORY_BYTES_PER_S = 1e9  # measured with 4 workers on 2 cores (docs/benchmarks.md, machines with several workers)
WIRE_FRAME_BYTES = 38  # of Ethernet around an IP packet: header, checksum, preamble and the gap to the next frame
_TCP_IP_BYTES = 52  # headers of a packet: IPv4, TCP and its time stamps
_SEGMENTS_PER_ACKNOWLEDGEMENT = 2
_LEAST_MTU, _MOST_MTU = 576, 9216


@dataclass(frozen=True)
class ClusterSpec:
    """A cluster of equal hosts. Raises InvalidArgument if there can be none like it.

    `bits_per_second` is the rate of a host's port in each direction, with all headers. `frame_bytes` are those that
    the rate counts around an IP packet. `workers_per_host` workers share a host's port and add up before it. `servers`
    dedicated servers have hosts of their own; with 0 every worker hosts a shard. Hosts are spread over the `racks` in
    contiguous blocks. A rack's uplink has the sum of its hosts' rates over `oversubscription`. With `rack_labels` the
    workers of a rack add up first (docs/hosts.md). `strict_priority`: switches serve marked packets first, as the
    hosts' own ports always do. `latency_s` is that of a message beside its bytes. `memory_bytes_per_s` is what one
    worker exchanges with the others of its host, in each direction.

    `products_per_s`: multiply-adds per second of the processor that multiplies factors. None: the accelerator does it
    between layers, as fast as it runs the layers. `price` is that of a host or server for one hour; 0: unknown. One
    worker, the slowest, computes `slowest` times as long as each of the others.
    """

    hosts: int
    bits_per_second: float
    workers_per_host: int = 1
    servers: int = 0
    racks: int = 1
    oversubscription: float = 1.0
    rack_labels: bool = False
    strict_priority: bool = False
    mtu: int = 1500
    frame_bytes: int = WIRE_FRAME_BYTES
    latency_s: float = 1e-4
    memory_bytes_per_s: float = MEMORY_BYTES_PER_S
    products_per_s: float | None = None
    price: float = 0.0
    slowest: float = 1.0

    def __post_init__(self) -> None:
        for name, is_wrong, problem in (*self._host_problems(), *self._network_problems()):
            if is_wrong:
                raise InvalidCluster(name, problem)

    def _host_problems(self) -> list[tuple[str, bool, str]]:
        """What could be wrong with the hosts: the setting, whether it is, and what to say."""
        hosts, each, servers = self.hosts, self.workers_per_host, self.servers
        memory, products = self.memory_bytes_per_s / 1e9, inf if self.products_per_s is None else self.products_per_s
        return [
            ("hosts", hosts < 1, f"hosts is {hosts}: it must be 1 or more"),
            ("workers_per_host", each < 1, f"workers_per_host is {each}: it must be 1 or more"),
            ("hosts", self.workers > MOST_WORKERS, f"there are {self.workers} workers: give {MOST_WORKERS} at most"),
            ("servers", servers < 0, f"servers is {servers}: it must be 0 (every worker hosts one) or more"),
            ("servers", servers > 0 and each > 1, f"{servers} servers and {each} workers per host: give one of them"),
            ("host_memory", not 0 < memory < inf, f"host_memory is {memory:g} GB/s: it must be above 0"),
            ("products", products <= 0, f"products is {products / 1e9:g}: it must be above 0"),
            ("price", not 0 <= self.price < inf, f"price is {self.price:g}: it must be 0 (unknown) or more"),
            ("slowest", not 1 <= self.slowest < inf, f"slowest is {self.slowest:g}: it must be 1 (none is) or more"),
            ("slowest", self.slowest > 1 and self.workers == 1, "slowest is set, but there is one worker"),
            ("servers", servers > 0 and hosts == 1, f"{servers} servers and one host: one host needs no servers"),
        ]

    def _network_problems(self) -> list[tuple[str, bool, str]]:
        """The same of the network."""
        hosts, racks, over, rate = self.hosts, self.racks, self.oversubscription, self.bits_per_second
        latency_ms, mtu, labels = self.latency_s * 1e3, self.mtu, self.rack_labels
        return [
            ("link", not 0 < rate < inf, f"the link's rate is {rate:g} bit/s: it must be above 0"),
            ("racks", not 1 <= racks <= hosts, f"racks is {racks}: {hosts} hosts can stand in 1 to {hosts} racks"),
            ("racks", racks > 1 and self.servers > 0, f"{racks} racks and {self.servers} servers: give one of them"),
            ("racks", racks > 1 and hosts % racks > 0, f"{hosts} hosts cannot be spread evenly over {racks} racks"),
            ("oversubscription", not 1 <= over < inf, f"oversubscription is {over:g}: it must be 1 or more"),
            ("oversubscription", over > 1 and racks == 1, f"oversubscription is {over:g}, but one rack has no uplink"),
            ("rack_labels", labels and racks == 1, "rack_labels is set, but there is one rack: give 2 or more"),
            ("mtu", not _LEAST_MTU <= mtu <= _MOST_MTU, f"mtu is {mtu}: give {_LEAST_MTU} to {_MOST_MTU} bytes"),
            ("latency_ms", not 0 <= latency_ms < inf, f"latency_ms is {latency_ms:g}: it must be 0 or more"),
        ]

    @property
    def workers(self) -> int:
        """The number of workers of all hosts."""
        return self.hosts * self.workers_per_host

    @property
    def hosts_per_rack(self) -> int:
        """The number of hosts of a rack."""
        return self.hosts // self.racks

    @property
    def payload_bytes_per_s(self) -> float:
        """What a port carries in one direction when both are busy, without the headers of Ethernet, IP and TCP.

        The other direction's acknowledgements share the port.
        """
        segment = self.mtu - _TCP_IP_BYTES
        headers = self.frame_bytes + _TCP_IP_BYTES
        sent = segment + headers + headers / _SEGMENTS_PER_ACKNOWLEDGEMENT
        return self.bits_per_second / 8 * segment / sent

    @property
    def uplink_bytes_per_s(self) -> float:
        """The same of a rack's uplink."""
        return self.payload_bytes_per_s * self.hosts_per_rack / self.oversubscription

    def core(self) -> _core.Cluster:
        """The cluster as plans see it, whose costs are what a host's port carries: racks make no difference to it."""
        if self.workers_per_host > 1 and self.hosts > 1:
            return self._together(self.workers_per_host)
        return self._alone()

    def rack_core(self) -> _core.Cluster:
        """The cluster whose costs are what a rack's uplink carries if workers add up by rack."""
        return self._together(self.workers_per_host * self.hosts_per_rack)

    def _alone(self) -> _core.Cluster:
        if self.servers:
            return _core.Cluster(self.workers, self.servers, "dedicated")
        return _core.Cluster(self.workers, self.workers)

    def _together(self, size: int) -> _core.Cluster:
        """Neighbours of `size` workers add up among themselves."""
        machines = [rank // size for rank in range(self.workers)]
        return _core.Cluster(self.workers, self.workers, "colocated", machines)

    def __str__(self) -> str:
        words = f"{self.hosts} host{'s' * (self.hosts > 1)} on {format_rate(self.bits_per_second)}"
        each = " each" * (self.hosts > 1)
        words += f" with {self.workers_per_host} workers{each}" if self.workers_per_host > 1 else ""
        words += f" and {self.servers} dedicated servers" if self.servers else ""
        return words + (f" in {self.racks} racks, oversubscribed {self.oversubscription:g}:1" if self.racks > 1 else "")


class InvalidCluster(InvalidArgument):
    """A cluster that cannot exist. `field` is the setting at fault, as a cluster file names it."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(problem)
        self.field = field
