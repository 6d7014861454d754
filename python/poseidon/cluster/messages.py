"""What the launcher and the agents of a run tell each other through ssh: a line of JSON each.

The launcher says: `hello` (what do you have), `reach` (whom do you reach), `setup` (folder and program of the
workers), `start`, `signal`, `dismiss` and `kill` (a worker), `alive` (nothing else was to say). An agent says:
`alive`, `facts`, `reached`, `line` (of a worker's output), `marks` (failure_marks.py), `exit` (of a worker), `figures`
(live.py). A worker has a number, which is new for each process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from poseidon.version import VERSION

# An agent's first line. What came before is a greeting of the machine.
BANNER = f"poseidon agent {VERSION} speaks"
MOST_BYTES = 8 << 20  # of a message


class Malformed(Exception):
    """What came is no message."""


def encoded(kind: str, **fields: Any) -> bytes:
    """A message, with its line end. Texts may have surrogates for bytes that are no UTF-8."""
    return json.dumps({"is": kind, **fields}, separators=(",", ":")).encode() + b"\n"


_FACTS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("poseidon", "python", "torch", "machine", "memory"), str),
    **dict.fromkeys(("cores", "accelerators", "free_bytes", "doorbell_port"), int),
    **{"addresses": list, "ports": dict, "digests": dict, "has_folder": bool, "time": (int, float)},
}


def checked_facts(fields: dict[str, Any], files: Sequence[str]) -> dict[str, Any]:
    """An agent's answer to `hello`. Raises Malformed."""
    for name, kind in _FACTS.items():
        if not isinstance(fields.get(name), kind):
            raise Malformed(f"the fact {name} is {fields.get(name)!r}")
    texts = all(isinstance(one, str) for one in fields["addresses"])
    ports = all(isinstance(fields["ports"].get(name), int) for name in ("run", "before", "shards"))
    if not texts or not ports or fields["cores"] < 1 or set(fields["digests"]) != set(files):
        raise Malformed("facts that make no sense")
    return fields


class Messages:
    """Cuts a stream into messages."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
        """The messages that end in this piece: what each is, and its fields. Raises Malformed."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MOST_BYTES:
            raise Malformed(f"a message has more than {MOST_BYTES} bytes")
        for line in lines:
            try:
                fields = json.loads(line)
                yield str(fields.pop("is")), fields
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise Malformed(f"no message: {line[:80]!r}") from None
