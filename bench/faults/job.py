"""Real workers and servers that can be killed, frozen, let go on and replaced one by one, and what they say."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from poseidon.launch import free_port
from poseidon.options import to_environment
from poseidon.testbed import Testbed

_WORKER = Path(__file__).with_name("worker.py")
_LOG_BYTES = 2000  # of a worker's error output that a report quotes
_TRACE_SECONDS = 1.0  # for workers to write where they are


class FaultJobError(Exception):
    """A worker ended that should not have, or something did not happen in time; says what the workers wrote."""


@dataclass(frozen=True)
class Event:
    """What a worker said, or its end ("ended", with its exit code in data["code"]).

    at: seconds of the monotonic clock, which all processes of a machine share.
    """

    slot: int
    pid: int
    what: str
    at: float
    data: Mapping[str, Any] = field(default_factory=dict)


class SlotProcess:
    """One process of a slot."""

    def __init__(self, slot: int, command: Sequence[str], env: Mapping[str, str], events: queue.Queue[Event]) -> None:
        self.slot = slot
        self.frozen = False
        self._events = events
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 – open as long as the worker may write
        self.started_at = time.monotonic()
        # The pipe to its input ends with this process, and the worker with the pipe.
        self.process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self.process.pid

    @property
    def ended(self) -> bool:
        """Whether it has exited."""
        return self.process.poll() is not None

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):  # half a line of a worker that was killed
                said = json.loads(line)
                self._events.put(Event(self.slot, self.pid, said.pop("what"), said.pop("at"), said))
        code = self.process.wait()
        self._events.put(Event(self.slot, self.pid, "ended", time.monotonic(), {"code": code}))

    def send(self, number: int) -> float:
        """Sends it a signal; returns when."""
        now = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        self.frozen = number == signal.SIGSTOP or (self.frozen and number != signal.SIGCONT)
        return now

    def log(self) -> str:
        """The end of its error output."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), _LOG_BYTES, max(0, size - _LOG_BYTES)).decode(errors="replace").strip()

    def end(self) -> None:
        """Kills it, if need be, and waits for its end."""
        self.process.kill()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._log.close()


class FaultJob:
    """Workers of one job, each `worker.py ARGUMENTS` with a slot's variables. A context manager; one thread.

    options: of Poseidon, name to value; variables: further ones. testbed: worker i runs on its host i. Flight records
    go with the job, unless options say where to. servers: so many that stand alone on this machine, in the slots behind
    the workers'; one that is started again has the same address.
    """

    def __init__(
        self,
        world_size: int,
        arguments: Sequence[str],
        options: Mapping[str, object],
        variables: Mapping[str, str] | None = None,
        testbed: Testbed | None = None,
        servers: int = 0,
    ) -> None:
        self.world_size = world_size
        self.servers = range(world_size, world_size + servers)  # their slots
        self.events: queue.Queue[Event] = queue.Queue()
        self.current: dict[int, SlotProcess] = {}  # each slot's latest process
        self._workers: list[SlotProcess] = []
        self._arguments = list(arguments)
        self._testbed = testbed
        meeting_port, *self._server_ports = _free_ports(1 + servers)
        self.server_addresses = ",".join(f"127.0.0.1:{port}" for port in self._server_ports)
        if servers:
            options = {"servers": self.server_addresses, "server_cores": 1, **options}
        self._records = tempfile.TemporaryDirectory(prefix="poseidon-records-")
        self._variables = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            **to_environment({"flight_record": self._records.name, **options}),
            **(variables or {}),
        }
        self._place = {
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": testbed.hosts[0].address if testbed else "127.0.0.1",
            "MASTER_PORT": str(meeting_port),
        }

    def __enter__(self) -> FaultJob:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for worker in self._workers:
            worker.end()
        self._records.cleanup()

    def name(self, slot: int) -> str:
        """For people."""
        return f"server {slot - self.world_size}" if slot in self.servers else f"slot {slot}"

    def start(self, slot: int) -> SlotProcess:
        """Starts a process for this slot, the first one or one that takes the last one's place."""
        command, env = [sys.executable, str(_WORKER)], self._variables
        if slot in self.servers:
            command += ["serve", "--port", str(self._server_ports[slot - self.world_size])]
        else:
            command += self._arguments
            env = {**env, **self._place, "RANK": str(slot), "LOCAL_RANK": str(slot)}
            if self._testbed is not None:
                command = self._testbed.command(slot, command)
        worker = SlotProcess(slot, command, env, self.events)
        self.current[slot] = worker
        self._workers.append(worker)
        return worker

    def start_all(self) -> None:
        """Starts all slots, servers first."""
        for slot in (*self.servers, *range(self.world_size)):
            self.start(slot)

    def next_event(self, seconds: float) -> Event | None:
        """The next event; None when there is none for so long."""
        with contextlib.suppress(queue.Empty):
            return self.events.get(timeout=max(0.0, seconds))
        return None

    def wait_for(self, what: str, slots: Iterable[int], seconds: float, texts: Sequence[str] = ()) -> dict[int, Event]:
        """The first such event of each slot, of those whose text has all `texts`. FaultJobError if a process ends
        before, or after so many seconds."""
        deadline = time.monotonic() + seconds
        missing, found = set(slots), dict[int, Event]()
        while missing:
            event = self.next_event(deadline - time.monotonic())
            if event is None:
                raise FaultJobError(f"slots {sorted(missing)} did not say {what!r} for {seconds:g} s{self.report()}")
            if event.slot not in missing or event.pid != self.current[event.slot].pid:
                continue
            if event.what == what and all(text in event.data["text"] for text in texts):
                missing.remove(event.slot)
                found[event.slot] = event
            elif event.what == "ended":
                code = event.data["code"]
                raise FaultJobError(f"slot {event.slot} ended with {code} before it said {what!r}{self.report()}")
        return found

    def report(self) -> str:
        """What the workers wrote to their error output; those that live add where each of their threads is."""
        for worker in self._workers:
            if not worker.ended and not worker.frozen:
                worker.send(signal.SIGUSR1)
        time.sleep(_TRACE_SECONDS)
        logs = [(worker, worker.log()) for worker in self._workers]
        return "".join(
            f"\n--- {self.name(worker.slot)}, process {worker.pid}:\n{text}" for worker, text in logs if text
        )


def _free_ports(count: int) -> list[int]:
    """All different."""
    ports = set[int]()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)
