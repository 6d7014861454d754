"""The `tc` commands that shape a port: they give a device a rate, a burst, a queue and priority classes.

Only outgoing packets can be shaped, so each link is shaped at both of its ends. Classes share a port in strict
priority. Each class borrows the rate of the port, and HTB lends it to the class of the smallest `prio` that has
packets. HTB also guarantees every class some rate. Here that rate is as small as possible, and packets that use it
count against the port's rate.
"""

from __future__ import annotations

from dataclasses import dataclass

from poseidon.dscp import default_dscp

ETHERNET_HEADER_BYTES = 14
_LEAST_BURST_BYTES = 16 << 10
_LEAST_QUEUE_BYTES = 1 << 20
_BURST_SECONDS = 0.001
_QUEUE_SECONDS = 0.075  # a large incast fills a queue of this length before packets are dropped, as in a switch
_GUARANTEED_SHARE = 0.001  # of the port's rate, for each class


@dataclass(frozen=True)
class Shape:
    """Rate, packet size, number of priority classes and length of the queue of one direction of a link.

    The queue is as long as what the port sends in `queue_seconds`. None stands for 75 ms and at least 1 MiB.
    """

    bits_per_second: int
    mtu: int = 1500
    priorities: int = 1
    queue_seconds: float | None = None

    @property
    def burst_bytes(self) -> int:
        """The bytes that may leave at once after a pause: those of 1 ms, or more if the timer needs more to keep up."""
        return max(_LEAST_BURST_BYTES, self._bytes_in(_BURST_SECONDS), 2 * self.packet_bytes)

    @property
    def queue_bytes(self) -> int:
        """The bytes that may wait in each class before packets are dropped."""
        if self.queue_seconds is None:
            return max(_LEAST_QUEUE_BYTES, self._bytes_in(_QUEUE_SECONDS))
        return max(self.segment_bytes, self._bytes_in(self.queue_seconds))

    @property
    def segment_bytes(self) -> int:
        """The largest bundle of packets that the kernel forwards as one. More than 1 ms of them would be a burst."""
        return min(65536, max(2 * self.packet_bytes, self._bytes_in(_BURST_SECONDS)))

    @property
    def packet_bytes(self) -> int:
        """The largest packet with its Ethernet header."""
        return self.mtu + ETHERNET_HEADER_BYTES

    def commands(self, device: str) -> list[str]:
        """The lines for `tc -batch` that shape the outgoing packets of `device`."""
        # Identifiers are hexadecimal. Class 1:1 is the port; with several priorities 1:10, 1:11, … are its classes.
        leaves = ["1"] if self.priorities == 1 else [f"1{index}" for index in range(self.priorities)]
        lines = [
            f"qdisc add dev {device} root handle 1: htb default {leaves[-1]}",
            f"class add dev {device} parent 1: classid 1:1 htb rate {self.bits_per_second}bit "
            f"burst {self.burst_bytes} cburst {self.burst_bytes} quantum {self.packet_bytes}",
        ]
        if self.priorities > 1:
            lines += self._class_commands(device, leaves)
        return lines + [
            f"qdisc add dev {device} parent 1:{leaf} handle {leaf}0: bfifo limit {self.queue_bytes}" for leaf in leaves
        ]

    def change_commands(self, device: str) -> list[str]:
        """The lines that give this rate to a device that was shaped with another one. Its queues keep their lengths."""
        classes = (line for line in self.commands(device) if line.startswith("class add"))
        return [line.replace("class add", "class change", 1) for line in classes]

    def _class_commands(self, device: str, leaves: list[str]) -> list[str]:
        """The classes in strict priority, and the filters that find a packet's class by its code point."""
        guaranteed = max(1, round(self.bits_per_second * _GUARANTEED_SHARE))
        classes = [
            f"class add dev {device} parent 1:1 classid 1:{leaf} htb prio {index} rate {guaranteed}bit "
            f"burst {self.packet_bytes} ceil {self.bits_per_second}bit cburst {self.burst_bytes} "
            f"quantum {self.packet_bytes}"
            for index, leaf in enumerate(leaves)
        ]
        # Filters look at the packet, because the socket's priority does not leave the host. The last two bits do not
        # belong to the mark. The last class needs no filter: it is the default and gets all other code points.
        marked = list(zip(leaves, default_dscp(self.priorities), strict=True))[:-1]
        filters = [
            f"filter add dev {device} parent 1: protocol {protocol} prio {order} "
            f"u32 match {field} {code_point << 2:#04x} 0xfc flowid 1:{leaf}"
            for order, (protocol, field) in enumerate((("ip", "ip dsfield"), ("ipv6", "ip6 priority")), 1)
            for leaf, code_point in marked
        ]
        return classes + filters

    def _bytes_in(self, seconds: float) -> int:
        return int(self.bits_per_second * seconds / 8)
