"""What the launcher writes: lines of its workers, and sentences of its own."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import IO, Any

_AGAIN_SECONDS = 0.01


def tell(text: str) -> None:
    """Prints a sentence of the launcher itself on standard error."""
    with contextlib.suppress(OSError, ValueError):
        _write(sys.stderr, f"poseidon: {text}\n")


class Terminal:
    """Passes lines on. A run does not end because its output cannot be written, as when the disk is full."""

    def __init__(self) -> None:
        self._has_failed = False

    def show(self, rank: int, text: str, stream: IO[str]) -> None:
        """Writes a line of a worker. Bytes that are no UTF-8 are those of the text's surrogates."""
        try:
            _write(stream, f"[{rank}] {text}\n")
        except (OSError, ValueError) as error:
            if not self._has_failed:
                self._has_failed = True
                tell(f"output of workers is lost, because it cannot be written: {error}; the run goes on")


def _write(stream: IO[str], text: str) -> None:
    """Writes all of it now. What cannot be written stays in no buffer, where it would make the next call fail."""
    buffer: Any = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)  # with python -u there is no buffer between them
    if raw is None:  # as in a notebook
        print(text.encode(errors="replace").decode(), end="", file=stream, flush=True)
        return
    stream.flush()
    rest = text.encode(errors="surrogateescape")
    while rest:
        written = raw.write(rest)
        if written is None:  # somebody has made it non-blocking, and it is full
            time.sleep(_AGAIN_SECONDS)
        else:
            rest = rest[written:]
