"""The job's secret. All its processes prove that they know it before they exchange anything else (SECURITY.md).

No message of this module, and no other of Poseidon, contains a secret.
"""

from __future__ import annotations

import os
import secrets
import stat

from poseidon.errors import InvalidArgument

VARIABLE = "POSEIDON_SECRET"
SHORTEST_BYTES = 16
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def fresh() -> str:
    """A secret that nobody can guess."""
    return secrets.token_hex(32)


def choose(keyword: object, variable: str | None, path: str, path_source: str) -> tuple[tuple[str, ...], str]:
    """The secrets, and where they come from: the keyword `secret`, the variable POSEIDON_SECRET or the file at `path`.

    If there are several, the order of all options decides. Raises InvalidArgument for a text that is no secret.
    """
    if keyword is not None:
        if not isinstance(keyword, str):
            raise InvalidArgument(f"the keyword secret is of type {type(keyword).__name__}: give it as text")
        return _parse(keyword, "the keyword secret"), "keyword"
    if path and path_source in ("keyword", "command line"):
        return read(path), path_source
    if variable:
        return _parse(variable, VARIABLE), "environment"
    if path:
        return read(path), path_source
    return (), "default"


def read(path: str, name: str = "secret_file") -> tuple[str, ...]:
    """The secrets in a file that only its owner can read, one a line. `name`: what messages call the file.

    Raises InvalidArgument for a file that others can read, and for a text that is no secret.
    """
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & _OTHERS:
                raise InvalidArgument(
                    f"the {name} {path} can be read or written by others (mode {mode:04o}): chmod 600 {path}"
                )
            text = file.read().decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise InvalidArgument(f"the {name} {path} cannot be read: {why}") from None
    return _parse(text, f"the {name} {path}")


def _parse(text: str, origin: str) -> tuple[str, ...]:
    """One secret a line."""
    found = tuple(line.strip() for line in text.split("\n") if line.strip())
    if not found:
        raise InvalidArgument(f"{origin} is empty: put a random secret there, or leave it out")
    for secret in found:
        if len(secret.encode()) < SHORTEST_BYTES:
            raise InvalidArgument(
                f"{origin} has a secret of {len(secret.encode())} bytes, which can be guessed: use at least "
                f"{SHORTEST_BYTES}, at random, for example from: openssl rand -hex 32"
            )
    return found
