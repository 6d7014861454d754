"""The address of an admin port, and the token that it asks for."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from poseidon.errors import InvalidArgument
from poseidon.options import secret

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Address:
    """Where an admin port listens. `host` is numeric."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, what: str = "--admin") -> Address:
        """The address for PORT (on loopback), HOST:PORT or [IPV6]:PORT.

        Raises InvalidArgument for any other text, which is then called `what`.
        """
        host, colon, port = text.rpartition(":")
        if colon == "":
            host = _LOOPBACK
        if not (port.isascii() and port.isdigit() and int(port) <= 65535) or host in ("", "[]"):
            raise InvalidArgument(f"{what} is '{text}': give a port, or an address and a port such as 127.0.0.1:7070")
        try:
            found = socket.getaddrinfo(host.removeprefix("[").removesuffix("]"), int(port), type=socket.SOCK_STREAM)
        except OSError as error:
            raise InvalidArgument(
                f"{what} is '{text}': {host} is no address ({error.strerror}): give HOST:PORT"
            ) from None
        return cls(str(found[0][4][0]), int(port))

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this machine reach it."""
        return ipaddress.ip_address(self.host).is_loopback

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def read_token(path: str | None) -> str | None:
    """The token in a file that only its owner can read; none without a file. Raises InvalidArgument."""
    if path is None:
        return None
    tokens = secret.read(path, "admin_token_file")
    if len(tokens) != 1 or not tokens[0].isascii() or not tokens[0].isprintable() or " " in tokens[0]:
        raise InvalidArgument(
            f"the admin_token_file {path} must have one line of ASCII without spaces, for example from: "
            "openssl rand -hex 32"
        )
    return tokens[0]
