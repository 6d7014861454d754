"""The network of a testbed: namespaces, bridges and shaped links, made and removed with iproute2."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from poseidon.errors import PoseidonError
from poseidon.testbed.layout import MOST_PORTS, SYSTEM, Layout
from poseidon.testbed.shaping import Shape

NAMESPACE_FOLDER = Path("/var/run/netns")
HOST_DEVICE = "eth0"  # of a host's first port
_FIRST_NETWORK = 77  # second byte of the first ports' addresses; the next ports have the next numbers
_END_SECONDS = 2.0  # for processes in a namespace to end after SIGTERM


class TestbedError(PoseidonError):
    """A testbed cannot be made here, or the system refused a step of it."""

    code = "testbed"
    __test__ = False  # not a test class, whatever its name suggests to pytest


@dataclass(frozen=True)
class Host:
    """One machine of the testbed: a network namespace with shaped ports.

    `addresses` are those of its ports eth0, eth1 and so on.
    """

    name: str
    addresses: tuple[str, ...]
    namespace: str
    rack: int = 0

    @property
    def address(self) -> str:
        """Of the first port."""
        return self.addresses[0]

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the ports."""
        return tuple(f"eth{port}" for port in range(len(self.addresses)))


@dataclass(frozen=True)
class Port:
    """One end of a cable: a device in a namespace with its shape, and its bridge if it is a bridge's port."""

    namespace: str
    device: str
    shape: Shape
    bridge: str = ""


Link = tuple[Port, Port]


def missing_requirements() -> list[str]:
    """What is missing on this machine for a testbed. Empty if a testbed can be made."""
    missing = [] if os.name == "posix" and os.geteuid() == 0 else ["root rights"]
    return missing + [f"the command {tool} (package iproute2)" for tool in ("ip", "tc") if shutil.which(tool) is None]


def namespace_prefix(testbed_id: int) -> str:
    """The prefix of the names of all namespaces of a testbed."""
    return f"psd{testbed_id}-"


def address_prefixes(testbed_id: int) -> tuple[str, ...]:
    """The prefixes of the addresses of all possible ports of a testbed: one subnet for every port of a host."""
    return tuple(f"10.{_FIRST_NETWORK + port}.{testbed_id}." for port in range(MOST_PORTS))


def make_hosts(testbed_id: int, layout: Layout) -> list[Host]:
    """The names and addresses of the hosts of a testbed. Does not make them."""
    subnets = address_prefixes(testbed_id)[: layout.port_count]
    prefix = namespace_prefix(testbed_id)
    return [
        Host(
            f"h{index}",
            tuple(f"{subnet}{index + 1}" for subnet in subnets),
            f"{prefix}h{index}",
            layout.rack_of(index),
        )
        for index in range(layout.host_count)
    ]


def build(testbed_id: int, hosts: list[Host], layout: Layout) -> None:
    """Makes the namespaces, the switches and a shaped link for each port and uplink. Raises TestbedError.

    A rack's switch is a bridge, and a core bridge joins several; all are in one namespace. Ports of different numbers
    have bridges of their own, so that none of them can take another's packets.
    """
    switch = namespace_prefix(testbed_id) + "sw"
    _batch("ip", None, [f"netns add {namespace}" for namespace in (switch, *(host.namespace for host in hosts))])
    links = [link for port in range(layout.port_count) for link in _links(port, hosts, switch, layout)]
    lines: dict[str, list[str]] = defaultdict(list)
    for bridge in dict.fromkeys(port.bridge for link in links for port in link if port.bridge):
        lines[switch] += [
            f"link add {bridge} type bridge stp_state 0 forward_delay 0 mcast_snooping 0",
            f"link set {bridge} mtu {layout.mtu} addrgenmode none up",
        ]
    settings = f"mtu {layout.mtu} gso_max_size {layout.segment_bytes} addrgenmode none"
    for link in links:
        _connect(link, settings, lines)
    for host in hosts:
        for port, (device, address) in enumerate(zip(host.devices, host.addresses, strict=True)):
            lines[host.namespace] += _address_commands(device, address, layout.congestion)
            peers = [other.addresses[port] for other in hosts if other is not host]
            lines[host.namespace] += _neighbour_commands(device, address, peers)
    for namespace in (switch, *(host.namespace for host in hosts)):
        lines[namespace].append("link set lo up")
    for namespace, commands in lines.items():
        _batch("ip", namespace, commands)
    _shape(links)


def _address_commands(device: str, address: str, congestion: str) -> list[str]:
    """The lines for `ip -batch` that give a host's port its address, and its connections their congestion control."""
    lines = [f"addr add {address}/24 dev {device}"]
    if congestion != SYSTEM:
        # A namespace's own setting takes only what this machine allows to everybody. A route takes whatever is there.
        network = f"{address.rpartition('.')[0]}.0/24"
        lines.append(f"route replace {network} dev {device} scope link src {address} congctl {congestion}")
    return lines


def _neighbour_commands(device: str, address: str, peers: Iterable[str]) -> list[str]:
    """The lines that tell a host's port the hardware addresses of all others.

    The kernel finds out at most 1024 for all its namespaces together (gc_thresh3), which 33 hosts exceed. Connections
    then time out.
    """
    return [
        f"link set {device} address {_hardware_address(address)}",
        *(f"neigh replace {peer} lladdr {_hardware_address(peer)} dev {device} nud permanent" for peer in peers),
    ]


def _hardware_address(address: str) -> str:
    return "02:00:" + ":".join(f"{int(part):02x}" for part in address.split("."))


def _links(port: int, hosts: list[Host], switch: str, layout: Layout) -> list[Link]:
    """The links of the hosts' ports of one number, and the uplinks that join their racks' switches."""
    links = [
        (
            Port(host.namespace, host.devices[port], layout.host_shape),
            Port(switch, f"port{index}-{port}", layout.switch_shape, f"rack{host.rack}-{port}"),
        )
        for index, host in enumerate(hosts)
    ]
    if layout.racks > 1:
        links += [
            (
                Port(switch, f"up{rack}-{port}", layout.uplink_shape(rack), f"rack{rack}-{port}"),
                Port(switch, f"down{rack}-{port}", layout.uplink_shape(rack), f"core-{port}"),
            )
            for rack in range(layout.racks)
        ]
    return links


def _connect(link: Link, settings: str, lines: dict[str, list[str]]) -> None:
    near, far = link
    lines[far.namespace].append(f"link add {far.device} type veth peer name {near.device} netns {near.namespace}")
    for port in link:
        master = f"master {port.bridge} " if port.bridge else ""
        lines[port.namespace].append(f"link set {port.device} {settings} {master}up")


def _shape(links: Iterable[Link]) -> None:
    commands: dict[str, list[str]] = defaultdict(list)
    for link in links:
        for port in link:
            commands[port.namespace] += port.shape.commands(port.device)
    for namespace, lines in commands.items():
        _batch("tc", namespace, lines)


def change_rate(testbed_id: int, hosts: list[Host], layout: Layout, index: int) -> None:
    """Gives both directions of all ports of one host the rate of this layout. Raises TestbedError."""
    switch = namespace_prefix(testbed_id) + "sw"
    for port in range(layout.port_count):
        for end in _links(port, hosts, switch, layout)[index]:
            _batch("tc", end.namespace, end.shape.change_commands(end.device))


def namespaces_of(testbed_id: int) -> list[str]:
    """Names of the existing namespaces of a testbed."""
    if not NAMESPACE_FOLDER.is_dir():
        return []
    prefix = namespace_prefix(testbed_id)
    return sorted(entry.name for entry in NAMESPACE_FOLDER.iterdir() if entry.name.startswith(prefix))


def own_addresses() -> list[str]:
    """IPv4 addresses of this machine's own network."""
    devices = json.loads(_run(["ip", "-j", "-4", "addr"]))
    return [entry["local"] for device in devices for entry in device["addr_info"] if "local" in entry]


def remove(namespaces: list[str]) -> None:
    """Ends the processes inside the namespaces and removes them with all their links. Raises TestbedError."""
    _end_processes(namespaces)
    _batch("ip", None, [f"netns del {namespace}" for namespace in namespaces])


def _end_processes(namespaces: list[str]) -> None:
    deadline = time.monotonic() + _END_SECONDS
    signal_number = signal.SIGTERM
    while pids := _processes_in(namespaces):
        for pid in pids:
            try:
                os.kill(pid, signal_number)
            except ProcessLookupError:
                continue
        time.sleep(0.05)
        if time.monotonic() > deadline:
            if signal_number == signal.SIGKILL:
                return
            signal_number, deadline = signal.SIGKILL, time.monotonic() + _END_SECONDS


def _processes_in(namespaces: list[str]) -> list[int]:
    """The other processes whose network is one of `namespaces`. Zombies have no network."""
    pids = map(int, _batch("ip", None, [f"netns pids {name}" for name in namespaces]).split())
    return [pid for pid in pids if pid != os.getpid()]


def _batch(tool: str, namespace: str | None, lines: list[str]) -> str:
    """Runs `lines` with one process of `ip` or `tc`, inside `namespace` if given. Returns its output."""
    return _run([tool, *(["-n", namespace] if namespace else []), "-batch", "-"], "\n".join(lines) + "\n")


def _run(command: list[str], text: str = "") -> str:
    """Runs a command with `text` as its input and returns its output. Raises TestbedError with its error message."""
    done = subprocess.run(
        command,
        input=text,
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,  # Ctrl-C must not stop a removal half-way
    )
    if done.returncode != 0:
        reason = (done.stderr.strip() or f"exit code {done.returncode}").replace("\n", "; ")
        raise TestbedError(f"`{' '.join(command)}` refused a step of the testbed: {reason}")
    return done.stdout
