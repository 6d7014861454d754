"""The launcher's end of an ssh connection to the agent of a machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO, Any

from poseidon.cluster.messages import BANNER, Malformed, Messages, encoded
from poseidon.errors import InvalidArgument
from poseidon.launch.lines import Lines
from poseidon.launch.workers import Reader, die_with_parent

_MOST_LINES = 40  # of the errors that ssh and the machine have written
_GREETING_BYTES = 1 << 20  # of what a machine may say before the agent does
_END_S = 1.0

OnMessage = Callable[[str, dict[str, Any]], None]


class Connection:
    """Reads as a `Reader` what ssh writes, and gives its messages to `on_message`.

    `lines` has the last lines of standard error. `on_error_line` gets each of them, once the agent speaks. Any thread
    may send; all else is for one.
    """

    def __init__(self, command: Sequence[str], on_message: OnMessage, on_error_line: Callable[[str], None]) -> None:
        self._on_message, self._on_error_line = on_message, on_error_line
        self._messages = Messages()
        self._greeting: bytes | None = b""  # None: the agent speaks
        self._outgoing = b""
        self._sending = threading.Lock()
        self.heard_at = time.monotonic()
        self.lines: deque[str] = deque(maxlen=_MOST_LINES)
        self.is_open = True
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C and a closed terminal are the launcher's to pass on
                preexec_fn=die_with_parent(),
            )
        except OSError as error:
            raise InvalidArgument(f"ssh cannot be started: {command[0]!r}: {error.strerror}") from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        # What is to be read, and by whom.
        self.files: list[tuple[IO[bytes], Reader]] = [
            (self._process.stdout, self),
            (self._process.stderr, Lines(self._take_error_line)),
        ]

    @property
    def speaks(self) -> bool:
        """Whether the agent has begun to."""
        return self._greeting is None

    def status(self) -> int:
        """How ssh has ended. Waits for a moment if it has closed its output and still runs."""
        try:
            return self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def send(self, kind: str, **fields: Any) -> None:
        """Sends a message, now or by `flush`. To a connection that is closed: does nothing."""
        with self._sending:
            self._outgoing += encoded(kind, **fields)
        self.flush()

    def flush(self) -> None:
        """Sends what ssh takes now."""
        assert self._process.stdin is not None
        with self._sending, contextlib.suppress(BlockingIOError, BrokenPipeError, ValueError):
            while self._outgoing:
                self._outgoing = self._outgoing[os.write(self._process.stdin.fileno(), self._outgoing) :]

    def hang_up(self) -> None:
        """The agent ends what it has started, and then its output."""
        assert self._process.stdin is not None
        with self._sending, contextlib.suppress(OSError):
            self._process.stdin.close()

    def give_up(self) -> None:
        """Ends ssh at once, as its machine does not answer."""
        self._process.kill()

    def end(self) -> None:
        """Ends ssh, if it has not ended by itself soon after `hang_up`."""
        self.hang_up()
        self.status()

    def feed(self, data: bytes) -> None:
        """See `Reader`."""
        if self._greeting is not None:
            data = self._after_greeting(data)
        try:
            for kind, fields in self._messages.feed(data):
                self._on_message(kind, fields)
        except (Malformed, KeyError, TypeError, ValueError, RecursionError, OverflowError) as error:
            self.lines.append(f"what its agent says makes no sense: {error!r}")
            self._process.kill()
        self.heard_at = time.monotonic()  # not before: what hears the messages may have taken long

    def close(self) -> None:
        """See `Reader`."""
        self.is_open = False

    def _after_greeting(self, data: bytes) -> bytes:
        assert self._greeting is not None
        self._greeting += data
        banner = BANNER.encode() + b"\n"
        before, found, after = self._greeting.partition(banner)
        if found:
            self._greeting = None
            return after
        if len(before) > _GREETING_BYTES:
            self._process.kill()
        return b""

    def _take_error_line(self, text: str) -> None:
        self.lines.append(text)
        if self.speaks:
            self._on_error_line(text)
