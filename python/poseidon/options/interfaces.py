"""Where other machines reach this one, if its own list of hosts gives its name a loopback address.

Debian has 127.0.1.1 for it. Then MASTER_ADDR, which is the name of rank 0's machine, leads only to the machine itself.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator, Mapping
from typing import Any

# Documentation addresses (RFC 5737, RFC 3849). Connecting a datagram socket sends nothing; the kernel chooses the
# interface.
_ANYWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
_SIOCGIFADDR = 0x8915


def interfaces_of(values: Mapping[str, Any], sources: Mapping[str, str]) -> tuple[str, ...]:
    """`interfaces` as given, or the address at which other machines reach this one where MASTER_ADDR hides it."""
    given: tuple[str, ...] = tuple(values["interfaces"])
    on_one_machine = sources.get("local_world_size") != "default" and values["local_world_size"] == values["world_size"]
    if given or values["world_size"] == 1 or on_one_machine or not _is_hidden(values["master_addr"]):
        return given
    return next(((address,) for address in _own_addresses()), ())


def _is_hidden(name: str) -> bool:
    """Whether a name, other than those of the loopback device, has a loopback address here."""
    if name.startswith("localhost") or is_address(name):
        return False
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False  # the core waits for the name to get an address
    return all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)


def is_address(text: str) -> bool:
    """Whether the text is an address of IPv4 or IPv6."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _own_addresses() -> Iterator[str]:
    """The address of the default route, then those of the devices; none of the loopback device."""
    for family, anywhere in _ANYWHERE:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((anywhere, 9))
                address = str(probe.getsockname()[0])
        except OSError:  # no such family, or no route
            continue
        yield address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, device in socket.if_nameindex():
            request = struct.pack("256s", device.encode()[:15])
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:  # it has none
                continue
            address = socket.inet_ntoa(answer[20:24])
            if not ipaddress.ip_address(address).is_loopback:
                yield address
