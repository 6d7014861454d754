"""Starts N workers on this machine, as `poseidon run` does, and sees to it that none outlives the run.

Each worker has its own session and process group, so that Ctrl-C reaches it through the launcher only and
everything it started can be ended with it. The kernel kills the workers if the launcher itself is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from poseidon.errors import InvalidArgument
from poseidon.failure_marks import mark_order
from poseidon.options import (
    BY_NAME,
    FAILURE_MARK_VARIABLE,
    available_cpu_count,
    check_environment,
    fresh_secret,
    resolve_option,
    to_environment,
)
from poseidon.options.secret import VARIABLE as SECRET_VARIABLE
from poseidon.testbed import HOST_DEVICE, Testbed

GRACE_SECONDS = 5.0  # between the steps of ending workers
_POLL_SECONDS = 0.05
_MOST_RESTARTS = 3  # of each worker, unless told otherwise
_DRAIN_SECONDS = 1.0  # for output of processes that a worker left behind
_MOST_LINE_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1
_CLASSES = BY_NAME["priority_classes"]
# Below the ports that Linux gives to outgoing connections, one of which could otherwise take the port first.
_PORTS = range(20000, 30000)

OnLine = Callable[[int, str], None]


@dataclass(frozen=True)
class Failure:
    """A worker that failed. `code` is negative for a signal, as in subprocess."""

    rank: int
    code: int

    @property
    def exit_status(self) -> int:
        """What a shell would report for that worker."""
        return self.code if self.code > 0 else 128 - self.code

    @property
    def how(self) -> str:
        """In words, e.g. "with exit code 3"."""
        return f"with exit code {self.code}" if self.code > 0 else f"killed by {signal.Signals(-self.code).name}"

    def __str__(self) -> str:
        return f"rank {self.rank} failed first, {self.how}"


@dataclass
class Outcome:
    """How a run ended: the exit code of each rank's last process and how often it was started again, the first failure
    that ended the run, the ranks that had to be ended, and the signal (0: none) that stopped the launcher."""

    codes: list[int] = field(default_factory=list)
    restart_counts: list[int] = field(default_factory=list)
    first_failure: Failure | None = None
    ended_ranks: list[int] = field(default_factory=list)
    interrupted_by: int = 0

    @property
    def exit_status(self) -> int:
        """The exit status of the launcher: 0, that of the first failure, or 128 + signal."""
        if self.interrupted_by:
            return 128 + self.interrupted_by
        return self.first_failure.exit_status if self.first_failure else 0


@dataclass(frozen=True)
class _Recovery:
    """What is done about a worker that fails: how often it is started again, and whether the others can do without."""

    most_restarts: int = 0
    spares_workers: bool = False

    @classmethod
    def of(cls, on_failure: str, max_restarts: int | None) -> _Recovery:
        if on_failure == "abort":
            if max_restarts:
                raise InvalidArgument("workers are only started again with --on-failure rejoin or shrink: add it")
            return cls()
        most = _MOST_RESTARTS if max_restarts is None else max_restarts
        if most < 0:
            raise InvalidArgument(f"the number of restarts is {most}: it must be 0 or more")
        return cls(most, on_failure == "shrink")


def launch(
    command: Sequence[str],
    count: int,
    link: str | None = None,
    env: Mapping[str, str] | None = None,
    *,
    testbed: Testbed | None = None,
    options: Mapping[str, object] | None = None,
    master_port: int | None = None,
    on_line: OnLine | None = None,
    max_restarts: int | None = None,
) -> list[int]:
    """Runs `command` as `count` workers and returns their exit codes by rank (negative: a signal).

    `link` ("100mbit") puts each worker on a host of its own with a shaped port; `testbed` uses one that is up,
    rank i on its host i. `env` adds variables, `options` (name to value) sets options of Poseidon.
    Rank 0 has the terminal; the output of the others is prefixed with `[rank]`. With `on_line(rank, text)` every
    rank's output goes there instead. When a rank fails the others are ended, and standard error says who was first.
    With the option on_failure=rejoin or shrink it is started again instead, up to `max_restarts` times (None: 3),
    unless another has finished; after that the run ends, or with shrink goes on without it.

    Raises InvalidArgument for what cannot be started, TestbedError where there can be no shaped links, and
    KeyboardInterrupt or SystemExit after a signal, once all workers have ended.
    """
    outcome = run_workers(command, count, link, env, testbed, options, master_port, on_line, max_restarts)
    if outcome.interrupted_by == signal.SIGINT:
        raise KeyboardInterrupt
    if outcome.interrupted_by:
        raise SystemExit(outcome.exit_status)
    return outcome.codes


def run_workers(
    command: Sequence[str],
    count: int,
    link: str | None = None,
    env: Mapping[str, str] | None = None,
    testbed: Testbed | None = None,
    options: Mapping[str, object] | None = None,
    master_port: int | None = None,
    on_line: OnLine | None = None,
    max_restarts: int | None = None,
) -> Outcome:
    """As `launch`, but a signal ends up in the outcome instead of an exception."""
    if count < 1:
        raise InvalidArgument(f"the number of workers is {count}: it must be 1 or more")
    if link is not None and testbed is not None:
        raise InvalidArgument("a link rate cannot be given together with a testbed, whose links have theirs")
    if testbed is not None and len(testbed.hosts) < count:
        raise InvalidArgument(f"{count} workers need {count} hosts, but the testbed has {len(testbed.hosts)}")
    variables = {**(env or {}), **to_environment(options or {})}
    recovery = _Recovery.of(resolve_option("on_failure", {**os.environ, **variables}), max_restarts)
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(_caught_signals())
        if link is not None:
            classes = variables.get(_CLASSES.variable, _CLASSES.default)
            testbed = stack.enter_context(Testbed(count, link, priorities=int(classes)))
        environments = _environments(count, variables, testbed, master_port)
        check_environment(environments[0])  # once here, instead of an exception in each worker
        marks = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="poseidon-run-")))
        for rank, environment in enumerate(environments):
            environment[FAILURE_MARK_VARIABLE] = str(marks / str(rank))
        commands = [testbed.command(rank, command) if testbed else list(command) for rank in range(count)]
        outcome = _Run(commands, environments, on_line, signals, recovery).run()
    if outcome.first_failure:
        ended = ", ".join(map(str, outcome.ended_ranks))
        tail = f"; these ranks did not end by themselves and were ended: {ended}" if ended else ""
        _tell(f"{outcome.first_failure}{tail}")
    return outcome


def _tell(text: str) -> None:
    print(f"poseidon: {text}", file=sys.stderr, flush=True)


def free_port() -> int:
    """A TCP port that nothing on this machine listens on now."""
    for port in random.sample(_PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise InvalidArgument(f"no free port found from {_PORTS[0]} to {_PORTS[-1]}: give one with --master-port")


def _environments(
    count: int, variables: Mapping[str, str], testbed: Testbed | None, master_port: int | None
) -> list[dict[str, str]]:
    """What each rank finds in its environment."""
    shared = {**os.environ, **variables}
    if BY_NAME["secret_file"].variable in variables:  # which beats a secret that was there before
        shared.pop(SECRET_VARIABLE, None)
    shared.update(fresh_secret(shared))
    shared.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # there is no agent: rank 0 serves the store
    shared.setdefault("OMP_NUM_THREADS", str(max(1, available_cpu_count() // count)))
    shared.setdefault("PYTHONUNBUFFERED", "1")
    if testbed is not None:
        # A host has one device and no name service; Gloo would look up the machine's name.
        shared.setdefault("GLOO_SOCKET_IFNAME", HOST_DEVICE)
        port = master_port or random.choice(_PORTS)
    else:
        port = master_port or free_port()
    shared["MASTER_ADDR"] = testbed.hosts[0].address if testbed else "127.0.0.1"
    shared["MASTER_PORT"] = str(port)
    shared["WORLD_SIZE"] = shared["LOCAL_WORLD_SIZE"] = str(count)
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


@dataclass
class _Signals:
    received: list[int] = field(default_factory=list)


@contextlib.contextmanager
def _caught_signals() -> Iterator[_Signals]:
    """Collects SIGINT, SIGTERM and SIGHUP instead of dying of them, so that what was made can be removed.

    A SIGHUP that is ignored, as under nohup, stays ignored. Only the main thread may set handlers; in another thread
    signals stay with whoever handles them.
    """
    signals = _Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return

    def note(number: int, frame: FrameType | None) -> None:
        signals.received.append(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Lines:
    """Cuts a worker's output into lines and gives them on as text."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._rest = b""

    def feed(self, data: bytes) -> None:
        *lines, rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._give(line)
        # A progress bar redraws its line after a carriage return: only the last state matters.
        self._rest = b"\r".join(rest.split(b"\r")[-2:])
        if len(self._rest) > _MOST_LINE_BYTES:
            self.close()

    def close(self) -> None:
        if self._rest:
            self._give(self._rest)
        self._rest = b""

    def _give(self, line: bytes) -> None:
        self._emit(line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace"))


@dataclass
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    ended: bool = False

    def has_ended(self) -> bool:
        """Whether it has exited; its process group stays reserved until `reap`."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.process.pid, flags) is not None

    def signal_group(self, number: int) -> None:
        if not self.ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def reap(self) -> int:
        """Ends what the worker left behind and returns its exit code."""
        self.signal_group(signal.SIGKILL)
        self.ended = True
        return self.process.wait()


class _Run:
    """One run: starts the workers, passes their output on and ends them; a single thread."""

    def __init__(
        self,
        commands: list[list[str]],
        environments: list[dict[str, str]],
        on_line: OnLine | None,
        signals: _Signals,
        recovery: _Recovery,
    ) -> None:
        self._recovery = recovery
        self._commands = commands
        self._environments = environments
        self._on_line = on_line
        self._signals = signals
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._outcome = Outcome(codes=[0] * len(commands), restart_counts=[0] * len(commands))
        self._finished = False  # one of them, so that the job is over
        self._failures: list[tuple[Failure, int]] = []  # that end the run, and when each was seen
        self._ladder: list[tuple[float, int]] = []  # when to send which signal to those that still run

    def run(self) -> Outcome:
        try:
            for rank in range(len(self._commands)):
                if not self._signals.received:
                    self._start(rank)
            self._react_to_signals()
            while self._running():
                self._pass_output(_POLL_SECONDS)
                self._collect()
                self._react_to_signals()
                self._climb_ladder()
            self._drain()
        finally:
            for worker in self._running():
                worker.reap()
            self._outcome.first_failure = self._first_failure()
            for key in list(self._selector.get_map().values()):
                key.data.close()
                key.fileobj.close()  # type: ignore[union-attr]
            self._selector.close()
        return self._outcome

    def _running(self) -> list[_Worker]:
        return [worker for worker in self._workers if not worker.ended]

    def _start(self, rank: int) -> None:
        piped = rank > 0 or self._on_line is not None
        command = self._commands[rank]
        try:
            process = subprocess.Popen(
                command,
                env=self._environments[rank],
                stdin=subprocess.DEVNULL if rank > 0 else None,
                stdout=subprocess.PIPE if piped else None,
                stderr=subprocess.PIPE if piped else None,
                start_new_session=True,
                preexec_fn=_die_with_parent(),
            )
        except OSError as error:
            raise InvalidArgument(f"rank {rank} cannot be started: {command[0]!r}: {error.strerror}") from None
        self._workers.append(_Worker(rank, process))
        for pipe, stream in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if pipe is not None:
                self._selector.register(pipe, selectors.EVENT_READ, _Lines(self._emitter(rank, stream)))

    def _emitter(self, rank: int, stream: IO[str]) -> Callable[[str], None]:
        on_line = self._on_line
        if on_line is not None:
            return lambda text: on_line(rank, text)
        return lambda text: print(f"[{rank}] {text}", file=stream, flush=True)

    def _pass_output(self, wait_seconds: float) -> None:
        for key, _ in self._selector.select(wait_seconds):
            if data := os.read(key.fd, _MOST_LINE_BYTES):
                key.data.feed(data)
            else:
                key.data.close()
                self._selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]

    def _collect(self) -> None:
        now_ns = time.monotonic_ns()
        for worker in self._running():
            if not worker.has_ended():
                continue
            code = self._outcome.codes[worker.rank] = worker.reap()
            self._finished |= code == 0
            if code == 0 or self._outcome.interrupted_by:
                continue
            failure = Failure(worker.rank, code)
            if not self._failures:
                self._react_to_failure(failure, now_ns)
            elif worker.rank not in self._outcome.ended_ranks:
                self._failures.append((failure, now_ns))

    def _react_to_failure(self, failure: Failure, now_ns: int) -> None:
        rank, most = failure.rank, self._recovery.most_restarts
        what = f"rank {rank} failed, {failure.how}"
        if not self._finished and self._outcome.restart_counts[rank] < most:
            self._outcome.restart_counts[rank] += 1
            _tell(f"{what}; it is started again (restart {self._outcome.restart_counts[rank]} of {most})")
            self._mark_of(rank).unlink(missing_ok=True)
            self._start(rank)
        elif self._recovery.spares_workers and (self._finished or self._running()):
            _tell(f"{what}; it is not started again, the others go on")
        else:
            self._failures.append((failure, now_ns))
            now = time.monotonic()
            # The others normally notice the loss and end with an error of their own that says more.
            self._ladder = [(now + GRACE_SECONDS, signal.SIGTERM), (now + 2 * GRACE_SECONDS, signal.SIGKILL)]

    def _first_failure(self) -> Failure | None:
        """Who failed on its own account, if anyone has, and first of those; a signal leaves no mark, but is quick."""

        def order(seen: tuple[Failure, int]) -> tuple[bool, int, bool]:
            failure, ended_ns = seen
            return *mark_order(self._mark_of(failure.rank), ended_ns), failure.code > 0

        return min(self._failures, key=order)[0] if self._failures else None

    def _mark_of(self, rank: int) -> Path:
        return Path(self._environments[rank][FAILURE_MARK_VARIABLE])

    def _react_to_signals(self) -> None:
        received, self._signals.received[:] = list(self._signals.received), []
        if not received:
            return
        now = time.monotonic()
        if self._outcome.interrupted_by:  # asked for the second time: no more patience
            self._ladder = [(now, signal.SIGKILL)]
            return
        self._outcome.interrupted_by = received[0]
        self._ladder = [
            (now, signal.SIGINT),
            (now + GRACE_SECONDS, signal.SIGTERM),
            (now + 2 * GRACE_SECONDS, signal.SIGKILL),
        ]

    def _climb_ladder(self) -> None:
        while self._ladder and time.monotonic() >= self._ladder[0][0]:
            _, number = self._ladder.pop(0)
            for worker in self._running():
                if number != signal.SIGINT and worker.rank not in self._outcome.ended_ranks:
                    self._outcome.ended_ranks.append(worker.rank)
                worker.signal_group(number)

    def _drain(self) -> None:
        deadline = time.monotonic() + _DRAIN_SECONDS
        while self._selector.get_map() and time.monotonic() < deadline:
            self._pass_output(_POLL_SECONDS)


def _die_with_parent() -> Callable[[], None]:
    """What a child runs before its program, so that the kernel kills it when its parent is killed."""
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was killed before the line above
            os._exit(1)

    return prepare
