"""One worker's process and its output."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from poseidon.launch.outcome import Failure

MOST_LINE_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1


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


@dataclass
class Worker:
    """A worker's process, which leads its own process group."""

    rank: int
    process: subprocess.Popen[bytes]
    replaces: Failure | None = None  # the failure of the process whose place it takes
    ended: bool = False

    def has_ended(self) -> bool:
        """Whether it has exited. Its process group stays reserved until `reap`."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.process.pid, flags) is not None

    def signal_group(self, number: int) -> None:
        """Sends a signal to the worker and all that it has started, unless it has been reaped."""
        if not self.ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def reap(self) -> int:
        """Ends the processes that the worker has left, and returns its exit code."""
        self.signal_group(signal.SIGKILL)
        self.ended = True
        return self.process.wait()


def die_with_parent() -> Callable[[], None]:
    """A child runs this before its program, so that the kernel kills it when its parent is killed."""
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was killed before the line above
            os._exit(1)

    return prepare
