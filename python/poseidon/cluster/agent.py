"""The program that `poseidon run --hosts` runs on each machine by ssh: it starts the workers of that machine.

It ends them, with all that they have started, as soon as its standard input ends or the launcher has been silent for
some seconds. It uses one thread, but for a moment before the run.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from poseidon import failure_marks
from poseidon.cluster.descendants import adopt_orphans, end_descendants
from poseidon.cluster.facts import Doorbell, facts, reaches
from poseidon.cluster.messages import BANNER, Malformed, Messages, encoded
from poseidon.errors import InvalidArgument
from poseidon.launch.guard import Guard
from poseidon.launch.lines import MOST_LINE_BYTES
from poseidon.launch.workers import LocalWorker, LocalWorkplace, Reader
from poseidon.live import read_boards
from poseidon.options import FAILURE_MARK_VARIABLE

SILENCE_S = 5.0  # of the launcher, which speaks every second
ALIVE_S = 1.0
_POLL_S = 0.05
_FIGURES_S = 1.0
_DRAIN_S = 1.0  # for what processes have written that a worker has left behind
_MOST_WAITING = 1 << 20  # bytes for the launcher, above which workers wait
_CANNOT_START = 127  # as a shell's


@dataclass
class _Process:
    """A worker's process, with what the launcher knows of its marks."""

    number: int
    worker: LocalWorker
    marks: Path
    files: set[int] = field(default_factory=set)  # of its output that are not read to their end
    ended_at: float | None = None
    told: dict[str, Any] = field(default_factory=dict)


class _WorkersOutput:
    """Whose output it is that LocalWorkplace attaches. See `Output`."""

    def __init__(self, agent: Agent, number: int) -> None:
        self._agent = agent
        self._number = number
        self.files: set[int] = set()

    def attach(self, file: IO[bytes], reader: Reader) -> None:
        """See `Output`."""
        self.files.add(file.fileno())
        self._agent.attach(file, reader, self.files)

    def show(self, rank: int, text: str, stream: IO[str]) -> None:
        """See `Output`."""
        self._agent.send("line", number=self._number, error=stream is sys.stderr, text=text)


class Agent:
    """One machine's part of a run, for as long as `commands` lasts. `answers`: a file descriptor to the launcher."""

    def __init__(self, commands: int, answers: int, folder: Path, guard: Guard) -> None:
        self._commands, self._answers = commands, answers
        self._folder = folder
        self._guard = guard
        self._messages = Messages()
        self._waiting = b""
        self._selector = selectors.DefaultSelector()
        self._doorbell: Doorbell | None = Doorbell()
        self._heard_at = time.monotonic()
        self._figures_at = self._alive_at = 0.0
        self._over = False
        self._program: list[str] = []
        self._shares_memory = False
        self._processes: list[_Process] = []
        self._paused = False
        self._readers: dict[int, tuple[IO[bytes], Reader, set[int]]] = {}

    def serve(self) -> None:
        """Returns when the launcher is gone, or has nothing to do any more. No worker outlives the call."""
        os.set_blocking(self._answers, False)
        self._selector.register(self._commands, selectors.EVENT_READ)
        assert self._doorbell is not None
        self._selector.register(self._doorbell, selectors.EVENT_READ)
        try:
            while not self._over and time.monotonic() < self._heard_at + SILENCE_S:
                self._pass_on()
                self._say_something()
                self._flush()
                self._tell_marks()
                self._tell_figures()
                self._collect()
        finally:
            for process in self._processes:
                if not process.worker.ended:
                    process.worker.reap()
            end_descendants(spared=self._guard.pid)

    def attach(self, file: IO[bytes], reader: Reader, of_worker: set[int]) -> None:
        """Reads a worker's output from now on. Its descriptor leaves `of_worker` at the end."""
        self._readers[file.fileno()] = (file, reader, of_worker)
        if not self._paused:
            self._selector.register(file.fileno(), selectors.EVENT_READ)

    def send(self, kind: str, **fields: Any) -> None:
        """Tells the launcher, now or when it reads."""
        self._waiting += encoded(kind, **fields)

    def _pass_on(self) -> None:
        for key, _ in self._selector.select(_POLL_S):
            if key.fd == self._commands:
                self._listen()
            elif key.fd in self._readers:
                self._read(key.fd)
            elif self._doorbell is not None:
                self._doorbell.answer()

    def _say_something(self) -> None:
        """So that the launcher sees that the agent runs. Not while it reads nothing."""
        if time.monotonic() >= self._alive_at and not self._waiting:
            self._alive_at = time.monotonic() + ALIVE_S
            self.send("alive")

    def _listen(self) -> None:
        data = os.read(self._commands, MOST_LINE_BYTES)
        if not data:
            self._over = True
            return
        self._heard_at = time.monotonic()
        for kind, fields in self._messages.feed(data):
            self._obey(kind, fields)

    def _read(self, file: int) -> None:
        stream, reader, of_worker = self._readers[file]
        if data := os.read(file, MOST_LINE_BYTES):
            reader.feed(data)
            return
        reader.close()
        self._selector.unregister(file)
        of_worker.discard(file)
        del self._readers[file]
        stream.close()

    def _flush(self) -> None:
        """Writes what the launcher takes now. Workers wait while it takes nothing."""
        with contextlib.suppress(BlockingIOError):
            while self._waiting:
                self._waiting = self._waiting[os.write(self._answers, self._waiting) :]
        full = len(self._waiting) > _MOST_WAITING
        if full != self._paused:
            self._paused = full
            for file in self._readers:
                if full:
                    self._selector.unregister(file)
                else:
                    self._selector.register(file, selectors.EVENT_READ)

    def _obey(self, kind: str, fields: dict[str, Any]) -> None:
        known: dict[str, Callable[..., None]] = {
            "hello": self._hello,
            "reach": self._reach,
            "setup": self._setup,
            "start": self._start,
            "signal": self._signal,
            "kill": self._kill,
            "dismiss": self._dismiss,
            "alive": lambda: None,
        }
        known[kind](**fields)

    def _hello(self, token: str, folder: str, files: list[str], counts_accelerators: bool) -> None:
        assert self._doorbell is not None
        self._doorbell.expect(bytes.fromhex(token))
        self.send("facts", **facts(folder, files, counts_accelerators), doorbell_port=self._doorbell.port)

    def _reach(self, token: str, targets: dict[str, tuple[list[str], int]]) -> None:
        """Tries all addresses of all at the same time, and answers others meanwhile."""
        assert self._doorbell is not None
        doorbell, secret = self._doorbell, bytes.fromhex(token)
        tries = [(name, address, port) for name, (addresses, port) in targets.items() for address in addresses]
        with ThreadPoolExecutor(max(1, len(tries))) as pool:
            futures = [pool.submit(reaches, address, port, secret) for _, address, port in tries]
            while not all(future.done() for future in futures):
                with contextlib.suppress(BlockingIOError):
                    doorbell.answer()
                time.sleep(_POLL_S / 10)
        reached: dict[str, list[str]] = {name: [] for name in targets}
        for (name, address, _), future in zip(tries, futures, strict=True):
            if future.result():
                reached[name].append(address)
        self.send("reached", addresses=reached)

    def _setup(self, folder: str, program: list[str], shares_memory: bool) -> None:
        """`program`: the arguments of Python. `shares_memory`: the launcher sees the workers' figures itself."""
        if self._doorbell is not None:
            self._selector.unregister(self._doorbell)
            self._doorbell.close()
            self._doorbell = None
        os.chdir(folder)
        self._program = [sys.executable, *program]
        self._shares_memory = shares_memory

    def _start(self, rank: int, number: int, environment: dict[str, str], program: list[str] | None = None) -> None:
        """`program`: another one than that of the run."""
        marks = self._folder / str(number)
        variables = {**os.environ, **environment, FAILURE_MARK_VARIABLE: str(marks)}
        command = [sys.executable, *program] if program else self._program
        workplace = LocalWorkplace({rank: command}, {rank: variables}, self._guard)
        output = _WorkersOutput(self, number)
        try:
            worker = workplace.start(rank, None, output)
        except InvalidArgument as error:
            self.send("line", number=number, error=True, text=str(error))
            self.send("exit", number=number, code=_CANNOT_START)
            return
        self._processes.append(_Process(number, worker, marks, output.files))

    def _signal(self, number: int, signal_number: int) -> None:
        for process in self._processes:
            if process.number == number and process.ended_at is None:
                process.worker.signal_group(signal_number)

    def _kill(self, number: int) -> None:
        """Its exit is told as any other."""
        self._signal(number, signal.SIGKILL)

    def _dismiss(self, number: int) -> None:
        """A SIGTERM to the worker alone: the processes that load its data go on until it has left."""
        for process in self._processes:
            if process.number == number and process.ended_at is None:
                process.worker.process.terminate()

    def _tell_marks(self) -> None:
        for process in self._processes:
            there = failure_marks.as_fields(process.marks)
            known = {key: value for key, value in there.items() if key != "age_ns"}
            if known != process.told:
                process.told = known
                self.send("marks", number=process.number, fields=there)

    def _tell_figures(self) -> None:
        """What the workers show of themselves, and whether the launcher has to show it."""
        if not self._processes or time.monotonic() < self._figures_at:
            return
        self._figures_at = time.monotonic() + _FIGURES_S
        sessions = {process.worker.process.pid for process in self._processes}
        found = []
        for figures in read_boards():
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(figures.pid) in sessions:
                    found.append(asdict(figures))
        if found:
            self.send("figures", workers=found, seen=self._shares_memory)

    def _collect(self) -> None:
        for process in list(self._processes):
            if process.ended_at is None and process.worker.has_ended():
                process.worker.reap()  # and what it has left, so that its output ends
                process.ended_at = time.monotonic()
            if process.ended_at is None:
                continue
            if process.files and self._paused:
                process.ended_at = time.monotonic()  # nothing is read for now
            if process.files and time.monotonic() < process.ended_at + _DRAIN_S:
                continue
            self._tell_marks()
            self.send("exit", number=process.number, code=process.worker.process.returncode)
            self._processes.remove(process)


def main() -> None:
    """Speaks with the launcher through standard input and output, which nothing else gets."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *about: None)  # workers would inherit SIG_IGN
    adopt_orphans()
    commands, answers = os.dup(0), os.dup(1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    os.write(answers, BANNER.encode() + b"\n")
    with tempfile.TemporaryDirectory(prefix="poseidon-run-") as folder:
        guard = Guard(Path(folder))
        try:
            Agent(commands, answers, Path(folder), guard).serve()
        except (Malformed, BrokenPipeError, ConnectionError) as error:
            sys.exit(f"the agent ends, and its workers: {error}")
        finally:
            guard.close()


if __name__ == "__main__":
    main()
