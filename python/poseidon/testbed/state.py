"""The testbeds that exist, with one file per testbed. So the remains of a killed run can be found and removed."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from poseidon.rates import format_rate, parse_rate
from poseidon.testbed import network
from poseidon.testbed.layout import Layout

_ID_COUNT = 255  # ids are the third byte of the addresses


@dataclass(frozen=True)
class Record:
    """A testbed as its file describes it. `owner_pid` is 0 for one that outlives the command that made it."""

    id: int
    layout: Layout
    owner_pid: int = 0
    owner_start: int = 0  # in clock ticks since boot; tells a reused pid from the owner's

    @classmethod
    def of_file(cls, text: str) -> Record:
        """The record that a file has. Raises ValueError, TypeError or KeyError if it is none."""
        content: dict[str, Any] = json.loads(text)
        own = {name: content.pop(name) for name in ("id", "owner_pid", "owner_start")}
        return cls(layout=Layout(bits_per_second=parse_rate(content.pop("link")), **content), **own)

    def file_text(self) -> str:
        """The text of its file: the layout's fields stand beside its own, and the rate as users write it."""
        layout = asdict(self.layout)
        link = format_rate(layout.pop("bits_per_second"))
        own = {"id": self.id, "owner_pid": self.owner_pid, "owner_start": self.owner_start}
        return json.dumps({**own, "link": link, **layout})

    def is_stale(self) -> bool:
        """Whether the owner ended without removing the testbed."""
        return self.owner_pid != 0 and start_of(self.owner_pid) != self.owner_start


def start_of(pid: int) -> int | None:
    """When a process started, in clock ticks since boot. None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


def folder() -> Path:
    """The folder of the files. It does not survive a reboot, and neither do namespaces."""
    path = Path("/run/poseidon-testbed")
    if not path.is_dir() and not os.access(path.parent, os.W_OK):
        path = Path(tempfile.gettempdir()) / path.name
    path.mkdir(mode=0o755, exist_ok=True)
    return path


@contextmanager
def locked() -> Iterator[None]:
    """Makes other processes wait that make or remove testbeds."""
    with (folder() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def records() -> list[Record]:
    """All testbeds that were made and not removed, by id. Skips files that are no records."""
    found = []
    for path in folder().glob("*.json"):
        try:
            found.append(Record.of_file(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue
    return sorted(found, key=lambda record: record.id)


def write(record: Record) -> None:
    """Stores a record; the lock must be held."""
    path = _path(record.id)
    path.with_suffix(".new").write_text(record.file_text(), encoding="utf-8")
    path.with_suffix(".new").replace(path)


def forget(testbed_id: int) -> None:
    """Removes the record, if there is one; the lock must be held."""
    _path(testbed_id).unlink(missing_ok=True)


def free_id() -> int:
    """The lowest id that no testbed, namespace or address of this machine uses; the lock must be held."""
    taken = {record.id for record in records()}
    addresses = network.own_addresses()
    for candidate in range(_ID_COUNT):
        in_use = any(address.startswith(network.address_prefixes(candidate)) for address in addresses)
        if candidate not in taken and not in_use and not network.namespaces_of(candidate):
            return candidate
    raise network.TestbedError("all ids of testbeds are taken: remove some with `poseidon testbed down`")


def known_ids() -> list[int]:
    """Ids of all testbeds that have a record or a namespace."""
    ids = {record.id for record in records()}
    return sorted(ids | {candidate for candidate in range(_ID_COUNT) if network.namespaces_of(candidate)})


def remove(testbed_id: int) -> None:
    """Removes a testbed's processes, namespaces, links and record; the lock must be held."""
    if namespaces := network.namespaces_of(testbed_id):
        network.remove(namespaces)
    forget(testbed_id)


def remove_stale() -> list[int]:
    """Removes the testbeds whose owner ended without doing so, and returns their ids; the lock must be held."""
    stale = [record.id for record in records() if record.is_stale()]
    for testbed_id in stale:
        remove(testbed_id)
    return stale


def _path(testbed_id: int) -> Path:
    return folder() / f"{testbed_id}.json"
