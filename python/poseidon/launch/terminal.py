"""What a process writes that lives long and has to hear signals: lines of its workers, and sentences of its own."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import IO, Any

_AGAIN_SECONDS = 0.01
_LAST_SECONDS = 1.0  # in which what has not been written may still be, after a signal
_MOST_WAITING = 1 << 18  # characters
_CLEAR = "\r\x1b[K"  # of a terminal's line


class Terminal:
    """Passes lines on. A run does not end because its output cannot be written, as when the disk is full.

    A thread of its own writes them, so that the main thread still hears signals and failures while nobody reads. The
    methods are for that one. `interrupted` says whether a signal has come that ends the process.
    """

    def __init__(self, interrupted: Callable[[], bool]) -> None:
        self._interrupted = interrupted
        self._has_failed = False
        self._changed = threading.Condition()
        self._waiting: deque[tuple[IO[str], str, bool]] = deque()  # the first one is being written
        self._progress = ""  # at the terminal's last line; for the thread alone
        self._waiting_size = 0
        self._is_over = False
        self._thread: threading.Thread | None = None

    def close(self) -> None:
        """Returns when all is written. After a signal it does not wait long for who does not read."""
        given_up = float("inf")
        with self._changed:
            while self._waiting and time.monotonic() < given_up:
                self._changed.wait(_AGAIN_SECONDS)
                if self._interrupted():
                    given_up = min(given_up, time.monotonic() + _LAST_SECONDS)
            self._is_over = True
            self._changed.notify_all()

    def show(self, prefix: str, text: str, stream: IO[str]) -> None:
        """Writes a line of a worker, with what says whose it is. Bytes that are no UTF-8 are surrogates."""
        if self._interrupted() and self._waiting_size > _MOST_WAITING:
            return  # the workers shall end, which they cannot while they wait for a reader
        self._put(stream, f"{prefix}{text}\n", is_line=True)

    def tell(self, text: str, who: str = "poseidon") -> None:
        """Prints a sentence of this process itself on standard error."""
        self._put(sys.stderr, f"{who}: {text}\n", is_line=False)

    def show_progress(self, text: str) -> None:
        """Keeps this line at the end of standard error, which is a terminal. An empty one is none."""
        self._put(sys.stderr, _CLEAR + text, is_line=False)

    def waits_for_reader(self, seconds: float) -> bool:
        """Whether no further line should come now. Waits up to so many seconds until one may."""

        def has_room() -> bool:
            return self._waiting_size <= _MOST_WAITING or self._interrupted()

        with self._changed:
            return not self._changed.wait_for(has_room, seconds)

    def _put(self, stream: IO[str], text: str, is_line: bool) -> None:
        with self._changed:
            self._waiting.append((stream, text, is_line))
            self._waiting_size += len(text)
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_all, name="poseidon output", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_over)
                if self._is_over:
                    return
                stream, text, is_line = self._waiting[0]
            if text.startswith(_CLEAR):
                self._progress = text.removeprefix(_CLEAR)
            elif self._progress:
                self._try(sys.stderr, _CLEAR, is_line=False)
            self._try(stream, text, is_line)
            if self._progress and not text.startswith(_CLEAR):
                self._try(sys.stderr, self._progress, is_line=False)
            with self._changed:
                self._waiting.popleft()
                self._waiting_size -= len(text)
                self._changed.notify_all()

    def _try(self, stream: IO[str], text: str, is_line: bool) -> None:
        try:
            _write(stream, text)
        except (OSError, ValueError) as error:
            if is_line and not self._has_failed:
                self._has_failed = True
                lost = f"output of workers is lost, because it cannot be written: {error}; the run goes on"
                with contextlib.suppress(OSError, ValueError):
                    _write(sys.stderr, f"poseidon: {lost}\n")


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
