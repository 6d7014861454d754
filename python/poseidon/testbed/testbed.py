"""Testbed: N hosts on one machine, each a network namespace whose ports into a switch are shaped."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from poseidon.errors import InvalidArgument
from poseidon.rates import format_rate, parse_rate
from poseidon.testbed import network, state
from poseidon.testbed.layout import Layout
from poseidon.testbed.network import Host, TestbedError

_TCP_COPY = Path(__file__).with_name("tcp_copy.py")


class Testbed:
    """N hosts whose ports send and receive at `link` at most, connected by one switch, or by one per rack.

    Every host has `ports` ports, eth0, eth1, …. The ports of one number form a subnet, so a packet leaves by the port
    of its destination's subnet.

    The switches' ports are FIFO queues. With `priorities` above 1 the hosts' own ports serve that many classes in
    strict priority, and with `honour_dscp` the switches' ports do so, too. The code points of the packets decide the
    class (`poseidon.dscp.default_dscp`); other packets are in the last class. With `fifo_hosts` the hosts' own ports
    are FIFO queues, too. A switch's port drops what does not fit
    its queue, which is as long as what it sends in `queue_ms` milliseconds (None: 75 ms, at least 1 MiB).

    `congestion` is the congestion control of the hosts' TCP: "reno", "cubic", "bbr", or "system" for that of this
    machine. The default does not depend on the machine.

    With several `racks` the hosts are assigned to them in contiguous blocks. All traffic that leaves or enters a rack
    shares its uplink. In each direction the uplink has the sum of the rates of the rack's hosts divided by
    `oversubscription`.

    A context manager: `with Testbed(4, "100mbit") as testbed: testbed.exec(0, ["ip", "addr"])`. Needs root
    and iproute2. It changes nothing in the machine's own network. If its process is killed, the next `up` of any
    testbed removes its remains. A `persistent` testbed is removed only by `down` or `remove(id)`.
    Not thread-safe.
    """

    __test__ = False  # not a test class, whatever its name suggests to pytest

    def __init__(
        self, host_count: int, link: str = "1gbit", *, persistent: bool = False, ports: int = 1, **network: Any
    ) -> None:
        """`network` has more fields of `Layout`: `mtu` (bytes) and those above.

        Raises InvalidArgument for an impossible count, rate (such as "31.25mbit"), mtu, ratio or queue.
        """
        self.layout = Layout(host_count, parse_rate(link), port_count=ports, **network)
        self._persistent = persistent
        self._id: int | None = None
        self.hosts: list[Host] = []  # by index; none while the testbed is not up
        self._processes: list[subprocess.Popen[Any]] = []

    @property
    def id(self) -> int:
        """The number in the names and addresses of its hosts. Raises TestbedError when it is not up."""
        if self._id is None:
            raise TestbedError("the testbed is not up")
        return self._id

    @property
    def link(self) -> str:
        """The rate of each port, such as "100mbit"."""
        return format_rate(self.layout.bits_per_second)

    @property
    def bits_per_second(self) -> int:
        """The rate of each port and direction, counted with Ethernet, IP and TCP headers."""
        return self.layout.bits_per_second

    def up(self) -> None:
        """Makes the hosts and their links. If it raises TestbedError, it leaves nothing behind."""
        if missing := network.missing_requirements():
            raise TestbedError(f"a testbed with shaped links needs {' and '.join(missing)}")
        with state.locked():
            state.remove_stale()
            testbed_id = state.free_id()
            state.write(self._record(testbed_id))
            hosts = network.make_hosts(testbed_id, self.layout)
            try:
                network.build(testbed_id, hosts, self.layout)
            except BaseException:
                state.remove(testbed_id)
                raise
        self._id, self.hosts = testbed_id, hosts

    def down(self) -> None:
        """Ends the processes in the hosts and removes all of it. Does nothing when it is not up."""
        if self._id is None:
            return
        for process in self._processes:  # a process that has not entered its host yet would not be found there
            if process.poll() is None:
                process.terminate()
        self._processes.clear()
        with state.locked():
            state.remove(self._id)
        self._id, self.hosts = None, []

    def __enter__(self) -> Testbed:
        self.up()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.down()

    def _record(self, testbed_id: int) -> state.Record:
        if self._persistent:
            return state.Record(testbed_id, self.layout)
        return state.Record(testbed_id, self.layout, os.getpid(), state.start_of(os.getpid()) or 0)

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` in a host. It becomes `argv`'s process and does not start a child."""
        return ["ip", "netns", "exec", self.hosts[host].namespace, *argv]

    def exec(self, host: int, argv: Sequence[str], **popen: Any) -> subprocess.Popen[Any]:
        """Starts `argv` in a host. `popen` is passed to subprocess.Popen."""
        self._processes = [process for process in self._processes if process.poll() is None]
        self._processes.append(subprocess.Popen(self.command(host, argv), **popen))
        return self._processes[-1]

    def set_rate(self, host: int, link: str) -> None:
        """Changes the rate of a host's ports, in both directions, while the testbed is up.

        Raises InvalidArgument for an impossible rate.
        """
        layout = replace(self.layout, bits_per_second=parse_rate(link))
        network.change_rate(self.id, self.hosts, layout, host)

    def copy_rate(self, source: int, destination: int, byte_count: int, dscp: int = 0) -> float:
        """Bits per second of payload that a plain TCP copy, with packets of a code point, reaches between two hosts."""
        return self.copy_rates([(source, destination)], byte_count, [dscp])[0]

    def copy_rates(
        self, pairs: Sequence[tuple[int, int]], byte_count: int, dscp: Sequence[int] | None = None
    ) -> list[float]:
        """As `copy_rate`, for several (source, destination) at the same time, each of `byte_count` bytes.

        dscp: one code point for each pair; None leaves all unmarked. Raises TestbedError when a copy fails.
        """
        if dscp is not None and len(dscp) != len(pairs):
            raise InvalidArgument(f"{len(dscp)} code points were given for {len(pairs)} copies: give one for each")
        if any(not 0 <= mark < 64 for mark in dscp or []):
            raise InvalidArgument(f"the code points are {', '.join(map(str, dscp or []))}: each must be from 0 to 63")
        marks = [str(mark) for mark in dscp or [0] * len(pairs)]
        program = [sys.executable, "-I", str(_TCP_COPY)]
        receivers, senders = [], []
        try:
            for (_, destination), mark in zip(pairs, marks, strict=True):
                argv = [*program, "receive", self.hosts[destination].address, mark]
                receivers.append(self.exec(destination, argv, stdout=subprocess.PIPE, text=True))
            ports = [(receiver.stdout.readline() if receiver.stdout else "").strip() for receiver in receivers]
            for (source, destination), port, mark in zip(pairs, ports, marks, strict=True):
                argv = [*program, "send", self.hosts[destination].address, port, str(byte_count), mark]
                senders.append(self.exec(source, argv))
            outputs = [receiver.communicate()[0] for receiver in receivers]
            if any(process.wait() != 0 for process in (*senders, *receivers)):
                raise TestbedError("a copy between hosts of the testbed failed")
            return [float(output) for output in outputs]
        finally:
            for process in (*senders, *receivers):
                process.kill()
                process.wait()


def remove(testbed_id: int) -> None:
    """Removes a testbed by its id, whoever made it. Raises TestbedError if there is none."""
    _require_rights()
    with state.locked():
        if testbed_id not in state.known_ids():
            raise TestbedError(f"there is no testbed {testbed_id}: `poseidon testbed status` lists them")
        state.remove(testbed_id)


def remove_all() -> list[int]:
    """Removes all testbeds of this machine, also those without a record, and returns their ids."""
    _require_rights()
    with state.locked():
        ids = state.known_ids()
        for testbed_id in ids:
            state.remove(testbed_id)
    return ids


def _require_rights() -> None:
    if missing := network.missing_requirements():
        raise TestbedError(f"removing a testbed needs {' and '.join(missing)}")
