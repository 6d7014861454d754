"""A job of one worker that shares the server with the others, and behaves well or badly while they are measured."""

from __future__ import annotations

import os
import queue
import random
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from faults.job import Event, SlotProcess
from poseidon.launch import free_port
from poseidon.options import to_environment
from tenancy.hosts import Tenants

_WORKER = Path(__file__).parent.parent / "faults" / "worker.py"
_PATIENCE_SECONDS = 120.0
_AGAIN_SECONDS = 2.0  # from the end of one process to the start of the next


@dataclass(frozen=True)
class Conduct:
    """How a neighbour behaves: what it exchanges again and again, and what happens to it in the middle of a push.

    `size` is relative to a victim's model. One that ends is started again, as another job.
    """

    name: str
    size: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    signal: signal.Signals | None = None
    refused: bool = False


class Neighbour:
    """The neighbour while it behaves so: a context manager, which begins when the neighbour exchanges or has failed.

    It runs at the lowest priority, because a real one would have a machine of its own.
    `said` are the errors that its processes got, and `starts` is how many there were. They got `signals` signals.
    """

    def __init__(self, tenants: Tenants, conduct: Conduct, size_bytes: int, options: Mapping[str, Any]) -> None:
        self.said: list[str] = []
        self.starts = self.signals = 0
        self._conduct = conduct
        self._tenants = tenants
        self._arguments = ["exchange", "--bytes", str(round(size_bytes * conduct.size) // 4 * 4)]
        self._options = {
            "servers": tenants.address,
            "transport": "tcp",
            "flight_record": "off",
            **options,
            **conduct.options,
        }
        self._events: queue.Queue[Event] = queue.Queue()
        self._begun, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True)

    def __enter__(self) -> Neighbour:
        self._thread.start()
        if not self._begun.wait(_PATIENCE_SECONDS):
            raise TimeoutError(f"the neighbour ({self._conduct.name}) did not begin")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    @property
    def objection(self) -> str:
        """Why it has not behaved as it should have. Empty if it has. Ask when it is over."""
        if self._conduct.signal is not None and self.signals == 0:
            return "it got no signal"
        if self._conduct.refused and not self.said:
            return "it got no error"
        return "" if self._conduct.refused or not self.said else f"it failed: {self.said[0]}"

    def _live(self) -> None:
        while not self._over.is_set():
            process = self._start()
            try:
                self._behave(process)
            finally:
                process.end()
            self._over.wait(_AGAIN_SECONDS)

    def _start(self) -> SlotProcess:
        self.starts += 1
        place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
        options = to_environment({"job": f"{self._conduct.name.replace(' ', '-')}-{self.starts}", **self._options})
        command = self._tenants.testbed.command(
            self._tenants.spare_host, ["nice", "-n", "19", sys.executable, str(_WORKER), *self._arguments]
        )
        return SlotProcess(0, command, {**os.environ, **options, **place}, self._events)

    def _behave(self, process: SlotProcess) -> None:
        while not self._over.is_set():
            try:
                event = self._events.get(timeout=0.1)
            except queue.Empty:
                continue
            if event.pid != process.pid:
                continue
            if event.what == "failed":
                self.said.append(event.data["text"])
            if event.what in ("ready", "failed", "ended"):
                self._begun.set()
            if event.what == "ended":
                if self._conduct.signal is None and not self._conduct.refused:
                    self.said.append(process.log())
                return
            if event.what == "ready" and self._conduct.signal is not None:
                self._over.wait(random.uniform(0.2, 0.8))  # it pushes all the time, so this is in the middle of a push
                process.send(self._conduct.signal)
                self.signals += 1
