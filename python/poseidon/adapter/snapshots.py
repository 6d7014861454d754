"""States on disk, from which a job goes on when all of its processes had to be started again.

A file is written in the background, as a whole or not at all, and carries a checksum: magic, length of the text,
text (`state_text`), the arrays' bytes, BLAKE2b-256 of all that. Nothing in it is unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import struct
import sys
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from poseidon.adapter.arrays import StateArrays
from poseidon.adapter.state_text import array_kinds, decode, encode
from poseidon.errors import InvalidArgument

_MAGIC = b"PSDSNAP1"  # the last character is the version of the format
_LENGTH = struct.Struct("<Q")
_DIGEST_BYTES = 32
_NAME = re.compile(r"step-(\d{12})\.snapshot")
_PARTIAL = re.compile(r"step-(\d{12})\.(?:\d+\.)?partial")


class Snapshots:
    """The newest `keep` snapshots of one job in `directory`. Only its user can read them. Use it from one thread.

    Raises InvalidArgument if the directory cannot be made. Later, standard error has a message for a file that cannot
    be written, and for one that cannot be read or is damaged. In the latter case the snapshot before it counts.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int, arrays: StateArrays) -> None:
        if keep < 1:
            raise InvalidArgument(f"keep is {keep}: at least one snapshot has to be kept")
        self._directory = Path(directory)
        self._keep_count = keep
        self._arrays = arrays
        self._writer: threading.Thread | None = None
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgument(f"the directory for snapshots cannot be made: {error}") from None

    def write(self, step: int, state: Any) -> None:
        """Copies `state` now and writes it in the background. Waits for the write before, if it is not over."""
        self.write_copy(step, *copied(state, self._arrays))

    def write_copy(self, step: int, text: str, copies: Sequence[Any]) -> None:
        """The same as `write`, for a state that `copied` has copied. Nobody may change it afterwards."""
        self.finish()
        # No daemon: a process that ends normally completes its last snapshot.
        self._writer = threading.Thread(target=self._write, args=(step, text, copies), name="poseidon snapshot")
        self._writer.start()

    def finish(self) -> None:
        """Waits until the last snapshot is on disk."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def check_start(self) -> None:
        """Raises InvalidArgument unless the state at the start is on disk: there must be one to go back to."""
        self.finish()
        if 0 not in self.steps():
            raise InvalidArgument(f"the state at the start cannot be written to {self._directory}, see above")

    def newest(self) -> Any:
        """The state of the newest snapshot that is in order, or None."""
        for step in self.steps():
            if (state := self.read(step)) is not None:
                return state
        return None

    def steps(self) -> list[int]:
        """The steps of which there is a snapshot, the newest first."""
        return sorted((step for step, _ in self._named(_NAME)), reverse=True)

    def _named(self, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
        """The files with such a name, and their steps."""
        found = ((pattern.fullmatch(path.name), path) for path in self._directory.iterdir())
        return [(int(match[1]), path) for match, path in found if match is not None]

    def read(self, step: int) -> Any:
        """The state of this snapshot. None, with a message, if it cannot be read or is damaged."""
        path = self._path(step)
        try:
            return self._read(path)
        except (OSError, ValueError) as error:
            tell(f"the snapshot {path} cannot be used ({error}); taking the one before it, if there is one")
            return None

    def drop_after(self, step: int) -> None:
        """Removes the snapshots of later steps, after the last one is on disk."""
        self.finish()
        for later in self.steps():
            if later > step:
                self._path(later).unlink(missing_ok=True)

    def _kept(self, steps: Sequence[int]) -> Collection[int]:
        """Of these, the newest first, those that stay."""
        return steps[: self._keep_count]

    def _path(self, step: int) -> Path:
        return self._directory / f"step-{step:012}.snapshot"

    def _write(self, step: int, text: str, copies: Sequence[Any]) -> None:
        path = self._path(step)
        partial = path.with_suffix(f".{os.getpid()}.partial")  # a rank 0 that was given up may still be writing its own
        try:
            with open(partial, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                self._write_content(file, text, copies)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
            _sync_directory(self._directory)
            steps = self.steps()
            for old in set(steps) - set(self._kept(steps)):
                self._path(old).unlink()
            self._remove_partials(step)
        except OSError as error:
            tell(f"the snapshot {path} cannot be written: {error}; training goes on without it")
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)

    def _write_content(self, file: BinaryIO, text: str, copies: Sequence[Any]) -> None:
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        data = text.encode()
        parts: list[bytes | memoryview] = [_MAGIC, _LENGTH.pack(len(data)), data]
        parts += [self._arrays.bytes_of(copy).data for copy in copies]
        for part in parts:
            digest.update(part)
            file.write(part)
        file.write(digest.digest())

    def _read(self, path: Path) -> Any:
        with open(path, "rb") as file:
            digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
            left = os.fstat(file.fileno()).st_size

            def take(size: int) -> bytearray:
                nonlocal left
                if size > left:
                    raise ValueError("it ends too early")
                left -= size
                part = bytearray(size)
                if file.readinto(part) != size:
                    raise ValueError("it ends too early")
                digest.update(part)
                return part

            if take(len(_MAGIC)) != _MAGIC:
                raise ValueError("it is no snapshot of this version")
            (length,) = _LENGTH.unpack(take(_LENGTH.size))
            text = take(length).decode()
            kinds = array_kinds(text, self._arrays)
            found = [self._arrays.make(kind, take(self._arrays.kind_size_bytes(kind))) for kind in kinds]
            expected = digest.digest()
            if take(_DIGEST_BYTES) != expected or left:
                raise ValueError("its checksum is wrong")
        return decode(text, found, self._arrays)

    def _remove_partials(self, step: int) -> None:
        """What processes that were killed have left of snapshots up to this step."""
        for started, path in self._named(_PARTIAL):
            if started <= step:
                with contextlib.suppress(OSError):
                    path.unlink()


def copied(state: Any, arrays: StateArrays) -> tuple[str, list[Any]]:
    """A state as text, and copies of its arrays in host memory."""
    text, found = encode(state, arrays)
    return text, [arrays.host_copy(array) for array in found]


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def tell(text: str) -> None:
    """Says on standard error what a training goes on after."""
    print(f"poseidon: {text}", file=sys.stderr, flush=True)
