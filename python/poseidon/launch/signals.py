"""The signals that a launcher collects while its workers run."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType


@dataclass
class Signals:
    """The signals that have arrived. `received`: the numbers of those to which nobody has reacted yet."""

    received: list[int] = field(default_factory=list)
    interrupted: bool = False  # some signal has arrived


@contextlib.contextmanager
def caught_signals() -> Iterator[Signals]:
    """Collects SIGINT, SIGTERM and SIGHUP instead of ending because of them, so that the launcher can clean up.

    A SIGHUP that is ignored, as under nohup, stays ignored. Only the main thread may set handlers. In another thread
    this leaves signals to their present handlers.
    """
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return

    def note(number: int, frame: FrameType | None) -> None:
        signals.received.append(number)
        signals.interrupted = True

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
