"""The processes of a run's workers: how they are started, signalled and ended, here or on other machines."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Protocol

from poseidon.errors import InvalidArgument
from poseidon.launch.guard import Guard
from poseidon.launch.lines import Lines
from poseidon.launch.outcome import Failure

_PR_SET_PDEATHSIG = 1


class Reader(Protocol):
    """Takes what comes from a file, piece by piece."""

    def feed(self, data: bytes) -> None:
        """The next piece."""

    def close(self) -> None:
        """There is no more."""


class Output(Protocol):
    """Who waits for the output of workers."""

    def attach(self, file: IO[bytes], reader: Reader) -> None:
        """Reads the file from now on, to its end, and closes it then."""

    def show(self, rank: int, text: str, stream: IO[str]) -> None:
        """A line that a worker has written on `stream`, this process's standard output or standard error."""


class Worker(Protocol):
    """A worker's process. Signals reach all that it has started, too."""

    rank: int
    replaces: Failure | None  # the failure of the process whose place it takes
    ended: bool  # it was reaped
    lost: bool  # nobody knows how it ended

    def has_ended(self) -> bool:
        """Whether it has exited. What it has started may still run, until `reap`."""

    def signal_group(self, number: int) -> None:
        """Sends a signal, unless it has been reaped."""

    def reap(self) -> int:
        """Ends what is left of it, and returns its exit code. Negative: a signal."""


class Workplace(Protocol):
    """Where the workers of a run are."""

    def ranks(self) -> Sequence[int]:
        """Those that begin."""

    def arrivals(self) -> Sequence[int]:
        """Those that are to be started since the last call, beside the first ones."""

    def is_dismissed(self, rank: int) -> bool:
        """Whether the worker of this rank is not wanted any more, so that its end is no failure."""

    def is_needed(self, rank: int) -> bool:
        """Whether the others cannot go on without the worker of this rank."""

    def start(self, rank: int, replaces: Failure | None, output: Output) -> Worker:
        """Starts a worker. Raises InvalidArgument if it cannot be started."""

    def host_of(self, rank: int) -> str:
        """The machine's name. Empty where all are on this machine."""

    def look(self) -> None:
        """Is called every now and then, more often than once a second."""

    def finish(self) -> None:
        """All workers have ended, and what they have written is read to its end."""


def die_with_parent() -> Callable[[], None]:
    """A child runs this before its program, so that the kernel kills it when its parent is killed."""
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was killed before the line above
            os._exit(1)

    return prepare


@dataclass
class LocalWorker:
    """A worker of this machine, which leads its own process group. See `Worker`."""

    rank: int
    process: subprocess.Popen[bytes]
    guard: Guard
    replaces: Failure | None = None
    ended: bool = False
    lost: bool = False

    def has_ended(self) -> bool:
        """Its process group stays reserved until `reap`."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.process.pid, flags) is not None

    def signal_group(self, number: int) -> None:
        """See `Worker`."""
        if not self.ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def reap(self) -> int:
        """See `Worker`."""
        self.signal_group(signal.SIGKILL)
        self.ended = True
        code = self.process.wait()
        self.guard.reaped(self.process.pid)
        return code


@dataclass
class LocalWorkplace:
    """This machine. Commands and environments by rank. See `Workplace`.

    `inherits`: rank 0's standard input and output are this process's own; "all": its standard error, too. Without that
    everything that workers write is read.
    """

    commands: Mapping[int, Sequence[str]]
    environments: Mapping[int, Mapping[str, str]]
    guard: Guard
    inherits: str = ""

    def ranks(self) -> Sequence[int]:
        """See `Workplace`."""
        return sorted(self.environments)

    def arrivals(self) -> Sequence[int]:
        """See `Workplace`."""
        return ()

    def is_dismissed(self, rank: int) -> bool:
        """See `Workplace`."""
        return False

    def is_needed(self, rank: int) -> bool:
        """See `Workplace`. Another worker of this machine takes rank 0's address over."""
        return False

    def start(self, rank: int, replaces: Failure | None, output: Output) -> LocalWorker:
        """See `Workplace`."""
        own = self.inherits if rank == 0 else ""
        command = self.commands[rank]
        try:
            process = subprocess.Popen(
                command,
                env=self.environments[rank],
                stdin=None if own else subprocess.DEVNULL,
                stdout=None if own else subprocess.PIPE,
                stderr=None if own == "all" else subprocess.PIPE,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        except OSError as error:
            raise InvalidArgument(f"rank {rank} cannot be started: {command[0]!r}: {error.strerror}") from None
        self.guard.started(process.pid)
        for file, stream in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if file is not None:
                output.attach(file, _lines(rank, stream, output))
        return LocalWorker(rank, process, self.guard, replaces)

    def host_of(self, rank: int) -> str:
        """See `Workplace`."""
        return ""

    def look(self) -> None:
        """See `Workplace`."""

    def finish(self) -> None:
        """See `Workplace`."""


def _lines(rank: int, stream: IO[str], output: Output) -> Lines:
    return Lines(lambda text: output.show(rank, text, stream), "surrogateescape")
