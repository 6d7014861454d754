"""Whether a worker has been asked to end between two steps, as SIGTERM asks."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

EXIT_STATUS = 128 + signal.SIGTERM
"""Of a worker that has left because it was asked to: what a shell reports for one that SIGTERM has ended."""


class Drain:
    """Whether this process has been asked to end: by SIGTERM, unless the program handles that itself, or by `ask`."""

    def __init__(self) -> None:
        self.asked = False
        self._meeting = False

    def listen(self) -> None:
        """From now on SIGTERM asks. Only the main thread can set that, and only for a signal that nobody handles."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_signal)

    def ask(self) -> None:
        """Any thread, any time."""
        self.asked = True

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Around waiting for the members of a generation, which ends at once when SIGTERM comes, as it may be long."""
        if self.asked:
            self.leave()
        self._meeting = True
        try:
            yield
        finally:
            self._meeting = False

    def leave(self) -> NoReturn:
        """Ends this process, as far as the program does not mind."""
        raise SystemExit(EXIT_STATUS)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.ask()
        if self._meeting:
            self.leave()
