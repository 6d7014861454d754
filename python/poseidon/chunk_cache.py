"""`chunk_bytes="auto"`: measured once for a cluster and its settings, then remembered (Parameter Hub §4.6)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import stat
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from poseidon.options import AUTO, BY_NAME, OPTIONS, PLACE, Settings, available_cpu_count
from poseidon.version import VERSION

if TYPE_CHECKING:
    from poseidon import _core

# What the fastest size depends on, as far as it can be told without measuring.
_DECIDING = tuple(option.name for option in (*PLACE, *OPTIONS) if option.decides_chunk_bytes)


def settle_chunk_bytes(client: _core.Client, settings: Settings, known: int = 0) -> int:
    """With `chunk_bytes="auto"` makes the client use the fastest chunk size, and returns it; otherwise returns 0.

    Collective: every rank calls it with the same settings before it adds layers. Rank 0 may know the size from an
    earlier start, or from an earlier client of this process (`known`). Otherwise all ranks measure it, which takes
    about a second, and rank 0 stores it. If the file cannot be read or written, there is a warning and the size is
    measured again. A worker that is alone with its own server sends nothing and keeps the default. Blocks. Raises a
    PoseidonError if the job fails meanwhile.
    """
    if settings.chunk_bytes != AUTO or (client.world_size == 1 and not settings.servers):
        return 0
    facts = {"version": VERSION, "host": socket.gethostname(), "cpu_count": available_cpu_count()}
    facts |= {name: getattr(settings, name) for name in _DECIDING} | {"world_size": client.world_size}
    if client.rank == 0:
        known = known or _load(facts)
    chosen = client.choose_chunk_bytes(known)
    if client.rank == 0 and chosen != known:
        _store(facts, chosen)
    return chosen


def cache_folder() -> Path:
    """The folder of this user in which Poseidon keeps what can be made again. It need not exist."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "poseidon"
    try:
        return Path.home() / ".cache" / "poseidon"
    except RuntimeError:  # a container's user may have neither HOME nor an entry in the list of users
        return _folder_without_home()


@cache
def _folder_without_home() -> Path:
    """A folder that no other user can have prepared: what is in it may be loaded as a program."""
    folder = Path(tempfile.gettempdir(), f"poseidon-cache-{os.getuid()}")
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
            return folder
    return Path(tempfile.mkdtemp(prefix="poseidon-cache-"))


def _path(facts: dict[str, object]) -> Path:
    """The file for a set of facts. Each set has its own, so that jobs that start together keep all their results."""
    text = json.dumps(facts, sort_keys=True)
    return cache_folder() / "chunk_bytes" / f"{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}.json"


def _load(facts: dict[str, object]) -> int:
    """The size that was measured for these facts; 0 if there is none."""
    try:
        size = json.loads(_path(facts).read_text(encoding="utf-8"))["chunk_bytes"]
        return int(BY_NAME["chunk_bytes"].read(size, "chunk_bytes"))
    except FileNotFoundError:
        return 0
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        _warn("read", error)
        return 0


def _store(facts: dict[str, object], chunk_bytes: int) -> None:
    """Writes the file as a whole or not at all."""
    try:
        path = _path(facts)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump({"chunk_bytes": chunk_bytes, "measured_with": facts}, file, indent=2)
            os.replace(name, path)
        except OSError:
            os.unlink(name)
            raise
    except (OSError, RuntimeError) as error:
        _warn("kept", error)


def _warn(what: str, error: Exception) -> None:
    warnings.warn(f"the measured chunk size cannot be {what} ({error}); each start measures it", stacklevel=3)
