"""Cuts the output of a process into lines."""

from __future__ import annotations

from collections.abc import Callable

MOST_LINE_BYTES = 1 << 16


class Lines:
    """Cuts a worker's output into lines and passes them on as text.

    `errors` says what becomes of bytes that are no UTF-8, as in `bytes.decode`.
    """

    def __init__(self, emit: Callable[[str], None], errors: str = "replace") -> None:
        self._emit = emit
        self._errors = errors
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Takes the next piece of output."""
        *lines, rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._give(line)
        # A progress bar redraws its line after a carriage return: only the last state matters.
        self._rest = b"\r".join(rest.split(b"\r")[-2:])
        if len(self._rest) > MOST_LINE_BYTES:
            self.close()

    def close(self) -> None:
        """Passes the last line on, if it has no line end."""
        if self._rest:
            self._give(self._rest)
        self._rest = b""

    def _give(self, line: bytes) -> None:
        self._emit(line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors=self._errors))
