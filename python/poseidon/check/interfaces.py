"""This machine's network interfaces, and whether the job uses the right one."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from poseidon.check.finding import Finding

_SIOCGIFADDR = 0x8915
_REQUEST = struct.Struct("256s")
_LINK_SCOPE = "20"  # in /proc/net/if_inet6


@dataclass(frozen=True)
class Interface:
    """`mbit`: its speed, 0 if the driver does not tell. `own_port`: no bridge, tunnel or container's end."""

    name: str
    addresses: tuple[str, ...]
    mtu: int
    mbit: int = 0
    own_port: bool = True


def interfaces() -> list[Interface]:
    """Those that are up and have an address, without loopback."""
    found = []
    of_version_6 = _ipv6_addresses()
    for _, name in socket.if_nameindex():
        folder = Path("/sys/class/net", name)
        addresses = (*_ipv4_address(name), *of_version_6.get(name, []))
        if addresses and name != "lo":
            own = (folder / "device").exists()
            found.append(Interface(name, addresses, _number(folder / "mtu"), max(0, _number(folder / "speed")), own))
    return found


def check_interface(all_of_them: Sequence[Interface], used: str) -> Finding | None:
    """`used`: the address at which this worker listens. A faster port lies idle, or it is no port of the machine."""
    one = next((one for one in all_of_them if used in one.addresses), None)
    if one is None:
        return None
    others = [other for other in all_of_them if other is not one and other.own_port]
    faster = max(others, key=lambda other: other.mbit, default=None)
    if faster is not None and one.mbit and faster.mbit > one.mbit:
        text = f"the job uses {one.name} ({one.mbit}mbit), while {faster.name} has {faster.mbit}mbit"
    elif faster is not None and not one.own_port:
        text = f"the job uses {one.name}, a bridge or tunnel, while {faster.name} is a port of the machine"
    else:
        return None
    return Finding(
        "several interfaces",
        text,
        f"export POSEIDON_INTERFACES={faster.name} MASTER_ADDR=ADDRESS   # that of rank 0 in the same network",
    )


def _ipv4_address(name: str) -> list[str]:
    """Of the interface; empty if it has none."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, _REQUEST.pack(name.encode()))
        return [socket.inet_ntoa(answer[20:24])]
    return []


def _ipv6_addresses() -> dict[str, list[str]]:
    """By interface, without those of one link, which are not unique."""
    found: dict[str, list[str]] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope != _LINK_SCOPE:
                found.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found


def _number(path: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return 0
