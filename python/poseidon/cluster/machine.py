"""A machine of a run as the launcher sees it: its connection, what it has answered, and its workers."""

from __future__ import annotations

import itertools
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from poseidon import failure_marks
from poseidon.cluster.connection import Connection
from poseidon.cluster.facts import memory_identity
from poseidon.cluster.hosts import Host
from poseidon.cluster.messages import Malformed, checked_facts
from poseidon.cluster.ssh import ssh_command, why_it_failed
from poseidon.errors import InvalidArgument
from poseidon.launch.lines import MOST_LINE_BYTES
from poseidon.launch.outcome import Failure
from poseidon.launch.workers import Output

LOST = 255  # the exit code of a worker whose connection is lost; ssh's own
_ALIVE_S = 1.0
_MOST_SIGNAL = 64
_SILENCE_S = 10.0  # of an agent, which speaks every second
_POLL_S = 0.05
_NUMBERS = itertools.count(1)


class Process(Protocol):
    """A process that the agent has started, or shall start."""

    number: int

    def line(self, text: str, error: bool) -> None:
        """It has written a line."""

    def marks(self, fields: dict[str, Any]) -> None:
        """What it has noted (failure_marks.py)."""

    def exit(self, code: int, lost: bool = False) -> None:
        """It has ended, or nobody knows."""


class Machine:
    """`tell(text)` is for what its ssh says during the run. `figures` are its workers', as of `live.WorkerFigures`."""

    def __init__(self, host: Host, ssh: str, python: str, tell: Callable[[str], None]) -> None:
        self.host = host
        self._python = python
        self._command = ssh_command(ssh, host.name, python)
        self._tell = tell
        self.processes: dict[int, Process] = {}
        self.answers: dict[str, dict[str, Any]] = {}
        self.figures: list[dict[str, Any]] = []
        self.shows_figures = False  # else this machine sees them itself
        self.is_awaited = False  # workers wait until it can be connected to again
        self.skew_s = 0.0  # how far its clock is from this one's, at least
        self._asked_at = 0.0
        self._files: list[str] = []
        self.connection = Connection(self._command, self._take, tell)

    @property
    def name(self) -> str:
        """As the user has given it."""
        return self.host.name

    def redial(self) -> None:
        """Connects again. Raises InvalidArgument if there is no ssh."""
        self.connection.end()
        self.connection = Connection(self._command, self._take, self._tell)

    def keep(self) -> None:
        """Sends what waits, and gives up an agent that has said nothing for long, as its machine answers no more."""
        self.connection.flush()
        answers = self.connection.speaks and "facts" in self.answers  # to find these takes long
        if answers and self.connection.is_open and time.monotonic() > self.connection.heard_at + _SILENCE_S:
            self.connection.lines.append(f"its agent has said nothing for {_SILENCE_S:g} s")
            self.connection.give_up()

    def close(self) -> None:
        """Its agent ends what it has started, and itself."""
        self.connection.end()

    def ask(self, token: bytes, files: Sequence[str]) -> None:
        """Asks for the machine's facts. `token`: by which the machines know each other."""
        self._asked_at, self._files = time.time(), list(files)
        self.connection.send(
            "hello",
            token=token.hex(),
            folder=str(Path.cwd()),
            files=list(files),
            counts_accelerators=self.host.workers is None,
        )

    @property
    def worker_count(self) -> int:
        """How many it is to have, by its facts."""
        return self.host.workers or max(1, self.answers["facts"]["accelerators"])

    def set_up(self, program: Sequence[str]) -> None:
        """Tells the agent what its workers are."""
        shares = self.answers["facts"]["memory"] == memory_identity()
        self.connection.send("setup", folder=str(Path.cwd()), program=list(program), shares_memory=shares)

    def start(self, process: Process, rank: int, environment: Mapping[str, str], program: Sequence[str] = ()) -> None:
        """`program`: another one than that of the run."""
        self.processes[process.number] = process
        self.connection.send(
            "start", rank=rank, number=process.number, environment=dict(environment), program=list(program) or None
        )

    def lose_processes(self) -> None:
        """The connection is lost, and the agent ends what it has started, if it lives."""
        lost, self.processes, self.figures = self.processes, {}, []
        for process in lost.values():
            process.exit(LOST, lost=True)

    def why(self) -> str:
        """A sentence about the connection that has ended."""
        if self.connection.speaks:
            last = next((line for line in reversed(self.connection.lines) if line.strip()), "")
            return f"the connection to host {self.name} is lost{f': {last}' if last else ''}"
        return why_it_failed(self.name, self._python, self.connection.status(), list(self.connection.lines))

    def _take(self, kind: str, fields: dict[str, Any]) -> None:
        """A message of the agent. One about a process that is none of this launcher's any more means nothing."""
        if kind == "facts":
            self.answers[kind] = checked_facts(fields, self._files)
            self.skew_s = max(self._asked_at - fields["time"], fields["time"] - time.time(), 0.0)
        elif kind == "reached":
            self.answers[kind] = {"addresses": {str(name): list(there) for name, there in fields["addresses"].items()}}
        elif kind == "figures":
            self.figures, self.shows_figures = list(fields["workers"]), not fields["seen"]
        elif kind in ("line", "marks", "exit"):
            self._pass_on(kind, fields)
        elif kind != "alive":
            raise Malformed(f"a message of the unknown kind {kind!r}")

    def _pass_on(self, kind: str, fields: dict[str, Any]) -> None:
        process = self.processes.get(fields["number"])
        if process is None:
            return
        if kind == "line":
            process.line(str(fields["text"]).replace("\n", " "), bool(fields["error"]))
        elif kind == "marks":
            process.marks(fields["fields"])
        elif not -_MOST_SIGNAL <= int(fields["code"]) <= LOST:
            raise Malformed(f"a worker's exit code {fields['code']}")
        else:
            del self.processes[process.number]
            process.exit(int(fields["code"]))


@dataclass(frozen=True)
class Seat:
    """Where a rank's worker is, and with which variables."""

    machine: Machine
    environment: Mapping[str, str]


@dataclass
class RemoteWorker:
    """A worker on another machine. See `Worker` and `Process`. `waits`: for a connection, so that nothing runs yet."""

    rank: int
    machine: Machine
    output: Output
    marks_path: Path
    replaces: Failure | None = None
    ended: bool = False
    lost: bool = False
    waits: bool = False
    code: int | None = None

    def __post_init__(self) -> None:
        self.number = next(_NUMBERS)

    def has_ended(self) -> bool:
        """See `Worker`."""
        return self.code is not None

    def signal_group(self, number: int) -> None:
        """See `Worker`."""
        if self.waits:
            self.exit(-number)
        elif not self.ended:
            self.machine.connection.send("signal", number=self.number, signal_number=number)

    def reap(self) -> int:
        """The agent does it. See `Worker`."""
        if self.code is None and not self.waits:
            self.machine.connection.send("kill", number=self.number)
        self.ended = True
        return -signal.SIGKILL if self.code is None else self.code

    def dismiss(self) -> None:
        """Asks it to leave the job between two steps, by a SIGTERM to it alone."""
        if self.waits:
            self.exit(-signal.SIGTERM)
        else:
            self.machine.connection.send("dismiss", number=self.number)

    def line(self, text: str, error: bool) -> None:
        """See `Process`."""
        self.output.show(self.rank, text, sys.stderr if error else sys.stdout)

    def marks(self, fields: dict[str, Any]) -> None:
        """See `Process`."""
        if not self.ended:
            failure_marks.take_over(self.marks_path, fields)

    def exit(self, code: int, lost: bool = False) -> None:
        """See `Process`."""
        self.code, self.lost, self.waits = code, lost, False


class Heartbeat:
    """Speaks to all machines every second, on a thread of its own, whatever the rest of this process does."""

    def __init__(self, machines: Sequence[Machine]) -> None:
        self._machines = machines
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="poseidon heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The agents end soon, if their connections do not end before."""
        self._over.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._over.wait(_ALIVE_S):
            for machine in list(self._machines):
                machine.connection.send("alive")


class Check:
    """A process before the run, whose output is kept. See `Process`."""

    def __init__(self) -> None:
        self.number = next(_NUMBERS)
        self.output: list[str] = []
        self.errors: list[str] = []
        self.code: int | None = None

    def line(self, text: str, error: bool) -> None:
        """See `Process`."""
        (self.errors if error else self.output).append(text)

    def marks(self, fields: dict[str, Any]) -> None:
        """See `Process`."""

    def exit(self, code: int, lost: bool = False) -> None:
        """See `Process`."""
        self.code = code


def wait_for(
    machines: Sequence[Machine],
    is_done: Callable[[Machine], bool],
    what: str,
    seconds: float,
    interrupted: Callable[[], bool],
    needs_all: bool = True,
) -> None:
    """Reads from all until each is done. Raises InvalidArgument with a line for each machine that is not.

    `what`: it does, for the sentence about one that takes more than `seconds`. `needs_all`: none can be done without
    the others, so that it ends with the first connection that is lost. Raises KeyboardInterrupt after a signal.
    """
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        for machine in machines:
            for file, reader in machine.connection.files:
                if not file.closed:
                    selector.register(file, selectors.EVENT_READ, reader)
        while any(machine.connection.is_open and not is_done(machine) for machine in machines):
            if interrupted():
                raise KeyboardInterrupt
            if time.monotonic() > deadline:
                break
            _read(selector)
            for machine in machines:
                machine.keep()
            lost = [machine for machine in machines if not (machine.connection.is_open or is_done(machine))]
            if needs_all and lost:
                break
        _read_rest(selector, machines)
    if problems := list(_problems(machines, is_done, what, seconds)):
        raise InvalidArgument("\n".join(problems))


def _read(selector: selectors.BaseSelector) -> None:
    for key, _ in selector.select(_POLL_S):
        data = key.fileobj.read1(MOST_LINE_BYTES)  # type: ignore[union-attr]
        if data:
            key.data.feed(data)
        else:
            key.data.close()
            selector.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]


def _read_rest(selector: selectors.BaseSelector, machines: Sequence[Machine]) -> None:
    """What ssh says about a connection that has ended comes on another pipe."""
    ends = time.monotonic() + 1.0
    while selector.get_map() and time.monotonic() < ends:
        open_ones = [file for one in machines if not one.connection.is_open for file, _ in one.connection.files]
        if all(file.closed for file in open_ones):
            return
        _read(selector)


def _problems(
    machines: Sequence[Machine], is_done: Callable[[Machine], bool], what: str, seconds: float
) -> Iterator[str]:
    lost = [machine for machine in machines if not (machine.connection.is_open or is_done(machine))]
    for machine in lost or machines:
        if is_done(machine):
            continue
        if machine.connection.is_open:
            yield f"host {machine.name} takes more than {seconds:g} s to {what}"
        else:
            yield machine.why()
