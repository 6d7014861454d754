"""The file in which a worker keeps its figures, and who reads it.

It lies in the machine's memory, in a folder that only the worker's user can enter. The worker holds a lock on it, so a
file without one is that of a process that has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from poseidon.live.figures import WorkerFigures

_PREFIX = "poseidon-"
_NEW = "new-"  # of a file that has no lock yet
_READS = 5  # of a file that is being written
_MOST_BYTES = 64 << 20  # of a file: some hundred bytes for each layer


def _base() -> Path:
    shared_memory = Path("/dev/shm")
    return shared_memory if os.access(shared_memory, os.W_OK) else Path(tempfile.gettempdir())


class Board:
    """A worker's file. Raises OSError where it cannot be made or written."""

    def __init__(self) -> None:
        folder = _base() / f"{_PREFIX}{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if not _is_private(folder, os.getuid()):
            raise PermissionError(f"{folder} belongs to another user, or others may write to it")
        _remove_abandoned(folder)
        # Only the process that made the lock has it: not a data loader, which may outlive its worker.
        self._file, name = tempfile.mkstemp(prefix=f"{_NEW}{os.getpid()}-", dir=folder)
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        made = Path(name)
        self._path = made.rename(made.with_name(made.name.removeprefix(_NEW)))

    def write(self, figures: WorkerFigures) -> None:
        """Replaces what is there."""
        text = json.dumps(vars(figures), default=vars, separators=(",", ":")).encode()
        data = b"%08x\n" % zlib.crc32(text) + text
        os.pwrite(self._file, data, 0)
        os.ftruncate(self._file, len(data))

    def close(self) -> None:
        """Removes the file."""
        self._path.unlink(missing_ok=True)
        os.close(self._file)


def read_boards() -> list[WorkerFigures]:
    """The figures of all workers of this machine that this user may see, by job and rank. Not for a worker itself."""
    found = []
    for folder in _base().glob(f"{_PREFIX}*"):
        uid = folder.name.removeprefix(_PREFIX)
        if not uid.isdigit() or not _is_private(folder, int(uid)):
            continue
        for path in _files(folder):
            with contextlib.suppress(OSError):  # it ends just now
                figures = _read(path, int(uid))
                if figures is not None:
                    found.append(figures)
    return sorted(found, key=lambda one: (one.run_key, one.rank))


def _files(folder: Path) -> Iterator[Path]:
    try:
        names = os.listdir(folder)
    except OSError:  # another user's
        return
    yield from (folder / name for name in names if not name.startswith(_NEW))


def _read(path: Path, uid: int) -> WorkerFigures | None:
    """None where there are no figures yet, or none any more, or the user has put something else there."""
    with _opened(path) as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_uid != uid or _is_abandoned(file.fileno()):
            return None
        for _ in range(_READS):
            file.seek(0)
            digest, _, text = file.read(_MOST_BYTES).partition(b"\n")
            if digest == b"%08x" % zlib.crc32(text):
                return _figures(text)
    return None


def _figures(text: bytes) -> WorkerFigures | None:
    """None for what no worker has written: other users' files may be anything."""
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return WorkerFigures.from_json(json.loads(text))
    return None


def _opened(path: Path) -> BinaryIO:
    """The file, without waiting for who may write into a pipe, and without following a link."""
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")


def _remove_abandoned(folder: Path) -> None:
    for path in _files(folder):
        with contextlib.suppress(OSError), _opened(path) as file:
            if _is_abandoned(file.fileno()):
                path.unlink()


def _is_abandoned(file: int) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_private(folder: Path, uid: int) -> bool:
    with contextlib.suppress(OSError):
        there = folder.lstat()
        return stat.S_ISDIR(there.st_mode) and there.st_uid == uid and there.st_mode & 0o022 == 0
    return False
