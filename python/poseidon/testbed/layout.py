"""The layout of a testbed: hosts and their ports, racks, rates, and the ports that honour priorities."""

from __future__ import annotations

from dataclasses import dataclass

from poseidon.dscp import MOST_CLASSES
from poseidon.errors import InvalidArgument
from poseidon.rates import LEAST_RATE, MOST_RATE, format_rate
from poseidon.testbed.shaping import Shape

MOST_HOSTS = 250
MOST_PORTS = 8
SYSTEM = "system"  # the congestion control that this machine's own connections have
CONGESTION_CONTROLS = ("reno", "bbr", "cubic", SYSTEM)
_MOST_QUEUE_MS = 10_000.0


@dataclass(frozen=True)
class Layout:
    """A checked description of a testbed's network. Raises InvalidArgument if such a network is impossible.

    Hosts are spread over the racks in contiguous blocks, as evenly as can be. A rack's uplink has, in each direction,
    the sum of its hosts' rates divided by `oversubscription`; each of a host's `port_count` ports is in a network of
    its own that looks like this.
    The hosts' own ports serve `priorities` classes in strict priority, as the queueing discipline pfifo_fast does; with
    `fifo_hosts` they do not. The switches' ports do so with `honour_dscp`. Otherwise both are plain FIFO queues. A
    switch's port and a host's FIFO port hold what they send in `queue_ms` milliseconds; None leaves
    the default of `Shape`. `congestion` is the congestion control of the hosts' TCP, one of CONGESTION_CONTROLS.
    """

    host_count: int
    bits_per_second: int
    mtu: int = 1500
    port_count: int = 1
    priorities: int = 1
    honour_dscp: bool = False
    racks: int = 1
    oversubscription: float = 1.0
    congestion: str = "reno"
    queue_ms: float | None = None
    fifo_hosts: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.host_count <= MOST_HOSTS:
            raise InvalidArgument(
                f"a testbed of {self.host_count} hosts cannot be made: it must have 1 to {MOST_HOSTS}"
            )
        if not 576 <= self.mtu <= 9216:
            raise InvalidArgument(f"the mtu is {self.mtu}: it must be from 576 to 9216 bytes")
        if not 1 <= self.port_count <= MOST_PORTS:
            raise InvalidArgument(f"hosts of {self.port_count} ports cannot be made: they must have 1 to {MOST_PORTS}")
        if not 1 <= self.priorities <= MOST_CLASSES:
            raise InvalidArgument(
                f"ports with {self.priorities} priorities cannot be made: they must have 1 to {MOST_CLASSES}"
            )
        if self.congestion not in CONGESTION_CONTROLS:
            raise InvalidArgument(
                f"the congestion control is {self.congestion!r}: it must be one of {', '.join(CONGESTION_CONTROLS)}"
            )
        if self.queue_ms is not None and not 0 < self.queue_ms <= _MOST_QUEUE_MS:
            raise InvalidArgument(
                f"a queue of {self.queue_ms:g} ms cannot be made: it must have more than 0 and at most "
                f"{_MOST_QUEUE_MS:g} ms"
            )
        self._check_racks()

    def _check_racks(self) -> None:
        if not 1 <= self.racks <= self.host_count:
            raise InvalidArgument(
                f"{self.host_count} hosts cannot stand in {self.racks} racks: "
                f"there must be 1 to {self.host_count}, so that none is empty"
            )
        if not self.oversubscription >= 1:
            raise InvalidArgument(f"the oversubscription is {self.oversubscription:g}: it must be 1 or more")
        if self.racks == 1:
            if self.oversubscription > 1:
                raise InvalidArgument(
                    f"the oversubscription is {self.oversubscription:g}, but one rack has no uplink: "
                    "give 2 or more racks"
                )
            return
        rates = [self.uplink_bits_per_second(rack) for rack in range(self.racks)]
        if min(rates) < LEAST_RATE or max(rates) > MOST_RATE:
            raise InvalidArgument(
                f"uplinks of {format_rate(min(rates))} to {format_rate(max(rates))} cannot be made: they must have "
                f"from {format_rate(LEAST_RATE)} to {format_rate(MOST_RATE)}; change the link rate, the racks "
                "or the oversubscription"
            )

    def rack_of(self, host: int) -> int:
        """The rack that a host stands in."""
        return host * self.racks // self.host_count

    def uplink_bits_per_second(self, rack: int) -> int:
        """Rate of a rack's uplink, in each direction."""
        hosts = sum(self.rack_of(host) == rack for host in range(self.host_count))
        return round(hosts * self.bits_per_second / self.oversubscription)

    @property
    def host_shape(self) -> Shape:
        """The shape of a host's own port, for what the host sends."""
        if self.fifo_hosts:
            return self._with_queue(self.bits_per_second, 1)
        return Shape(self.bits_per_second, self.mtu, self.priorities)

    @property
    def switch_shape(self) -> Shape:
        """The shape of a switch's port to a host, for what the host receives."""
        return self._switch_port(self.bits_per_second)

    def uplink_shape(self, rack: int) -> Shape:
        """The shape of both ports of a rack's uplink."""
        return self._switch_port(self.uplink_bits_per_second(rack))

    @property
    def segment_bytes(self) -> int:
        """The largest bundle of packets that any device forwards as one. The slowest link decides it."""
        uplinks = [self.uplink_shape(rack).segment_bytes for rack in range(self.racks)] if self.racks > 1 else []
        return min([self.host_shape.segment_bytes, *uplinks])

    def _switch_port(self, bits_per_second: int) -> Shape:
        return self._with_queue(bits_per_second, self.priorities if self.honour_dscp else 1)

    def _with_queue(self, bits_per_second: int, priorities: int) -> Shape:
        queue_seconds = None if self.queue_ms is None else self.queue_ms / 1e3
        return Shape(bits_per_second, self.mtu, priorities, queue_seconds)
