"""How a port is shaped: the `tc` commands that give a device a rate, a burst and a queue.

Only leaving packets can be shaped, so each link is shaped at both of its ends. An HTB class holds the
rate even where only one class is used: classes of several priorities share a port in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

ETHERNET_HEADER_BYTES = 14
_LEAST_BURST_BYTES = 16 << 10
_LEAST_QUEUE_BYTES = 1 << 20
_BURST_SECONDS = 0.001
_QUEUE_SECONDS = 0.075  # a large incast fills a queue of this length before packets are dropped, as in a switch


@dataclass(frozen=True)
class Shape:
    """Rate and packet size of one direction of a link."""

    bits_per_second: int
    mtu: int = 1500

    @property
    def burst_bytes(self) -> int:
        """What may leave at once after a pause: 1 ms worth, but enough for the timer to keep up with."""
        return max(_LEAST_BURST_BYTES, self._bytes_in(_BURST_SECONDS), 2 * self.packet_bytes)

    @property
    def queue_bytes(self) -> int:
        """What may wait for the port before packets are dropped."""
        return max(_LEAST_QUEUE_BYTES, self._bytes_in(_QUEUE_SECONDS))

    @property
    def segment_bytes(self) -> int:
        """Largest bundle of packets that the kernel passes on as one; more than 1 ms worth would be a burst."""
        return min(65536, max(2 * self.packet_bytes, self._bytes_in(_BURST_SECONDS)))

    @property
    def packet_bytes(self) -> int:
        """The largest packet with its Ethernet header."""
        return self.mtu + ETHERNET_HEADER_BYTES

    def commands(self, device: str) -> list[str]:
        """Lines for `tc -batch` that shape what leaves `device`."""
        return [
            f"qdisc add dev {device} root handle 1: htb default 1",
            f"class add dev {device} parent 1: classid 1:1 htb rate {self.bits_per_second}bit "
            f"burst {self.burst_bytes} cburst {self.burst_bytes} quantum {self.packet_bytes}",
            f"qdisc add dev {device} parent 1:1 handle 10: bfifo limit {self.queue_bytes}",
        ]

    def _bytes_in(self, seconds: float) -> int:
        return int(self.bits_per_second * seconds / 8)
