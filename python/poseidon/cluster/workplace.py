"""The machines of a run, as `Run` uses them: starts workers there, and connects again to one that was lost."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from poseidon.cluster.facts import memory_identity
from poseidon.cluster.machine import ALIVE_S, LOST, Machine, RemoteWorker
from poseidon.launch.outcome import Failure
from poseidon.launch.terminal import Terminal
from poseidon.launch.workers import Output, Worker
from poseidon.live import Board, WorkerFigures

_AGAIN_S = 2.0  # between two tries to connect
_MOST_AGAIN_S = 60.0  # for all tries


@dataclass
class _Waiting:
    """Workers of a machine that has to be connected to first."""

    until: float
    next_try: float
    workers: list[RemoteWorker] = field(default_factory=list)


class Machines:
    """See `Workplace`. `environments` by rank; `folder` and `program`: of the workers."""

    def __init__(
        self,
        machines: Sequence[Machine],
        counts: Sequence[int],
        environments: Sequence[Mapping[str, str]],
        program: Sequence[str],
        marks_folder: Path,
        terminal: Terminal,
    ) -> None:
        self._machines = machines
        self._of_rank = [machine for machine, count in zip(machines, counts, strict=True) for _ in range(count)]
        self._environments = environments
        self._program = list(program)
        self._marks_folder = marks_folder
        self._terminal = terminal
        self._output: Output | None = None
        self._alive_at = 0.0
        self._waiting: dict[str, _Waiting] = {}
        self._figures = Figures(len(environments), terminal)
        self._finished = False

    def start(self, rank: int, replaces: Failure | None, output: Output) -> Worker:
        """See `Workplace`."""
        if self._output is None:
            self._output = output
            for machine in self._machines:
                self._set_up(machine)
        machine = self._of_rank[rank]
        worker = RemoteWorker(rank, machine, output, self._marks_folder / str(rank), replaces)
        if machine.connection.is_open and machine.name not in self._waiting:
            machine.start(worker, rank, self._environments[rank])
        else:
            now = time.monotonic()
            waiting = self._waiting.setdefault(machine.name, _Waiting(now + _MOST_AGAIN_S, now))
            worker.waits = True
            waiting.workers.append(worker)
        return worker

    def host_of(self, rank: int) -> str:
        """See `Workplace`."""
        return self._of_rank[rank].name

    def look(self) -> None:
        """See `Workplace`."""
        now = time.monotonic()
        speak = now >= self._alive_at
        if speak:
            self._alive_at = now + ALIVE_S
        for machine in self._machines:
            machine.keep(speak)
            self._look_after(machine, now)
        if speak:
            self._figures.show(self._machines)

    def finish(self) -> None:
        """See `Workplace`."""
        self._finished = True
        for machine in self._machines:
            machine.connection.hang_up()
        self._figures.close()

    def _set_up(self, machine: Machine) -> None:
        assert self._output is not None
        for file, reader in machine.connection.files:
            if not file.closed:
                self._output.attach(file, reader)
        shares = machine.answers["facts"]["memory"] == memory_identity()
        machine.connection.send("setup", folder=str(Path.cwd()), program=self._program, shares_memory=shares)

    def _look_after(self, machine: Machine, now: float) -> None:
        if machine.connection.is_open:
            self._start_waiting(machine)
            return
        if machine.processes and not self._finished:
            self._terminal.tell(machine.why())
            machine.lose_processes()
        waiting = self._waiting.get(machine.name)
        if waiting is None:
            return
        waiting.workers = [worker for worker in waiting.workers if worker.waits]
        if now >= waiting.until or not waiting.workers:
            del self._waiting[machine.name]
            for worker in waiting.workers:
                worker.exit(LOST, lost=True)
        elif now >= waiting.next_try:
            waiting.next_try = now + _AGAIN_S
            machine.redial()
            self._set_up(machine)

    def _start_waiting(self, machine: Machine) -> None:
        """Once the agent speaks."""
        if machine.name in self._waiting and machine.connection.speaks:
            for worker in self._waiting.pop(machine.name).workers:
                if worker.waits:
                    worker.waits = False
                    machine.start(worker, worker.rank, self._environments[worker.rank])


class Figures:
    """What the workers show of themselves (live.py): for `poseidon top` on this machine, and as a line of progress."""

    def __init__(self, count: int, terminal: Terminal) -> None:
        self._count = count
        self._terminal = terminal
        self._at_terminal = sys.stderr.isatty()
        self._boards: dict[int, Board] = {}

    def show(self, machines: Sequence[Machine]) -> None:
        """Shows what has come."""
        found = [(fields, machine.shows_figures) for machine in machines for fields in machine.figures]
        workers = []
        for fields, shown_here in found:
            with contextlib.suppress(ValueError, TypeError, KeyError, OSError):
                worker = WorkerFigures.from_json(fields)
                workers.append(worker)
                if shown_here:
                    self._board(worker.rank).write(worker)
        for rank in set(self._boards) - {worker.rank for worker in workers}:
            self._boards.pop(rank).close()
        if workers and self._at_terminal:
            self._terminal.show_progress(progress(workers, self._count))

    def close(self) -> None:
        """Nobody trains any more."""
        while self._boards:
            self._boards.popitem()[1].close()
        if self._at_terminal:
            self._terminal.show_progress("")

    def _board(self, rank: int) -> Board:
        if rank not in self._boards:
            self._boards[rank] = Board()
        return self._boards[rank]


def progress(workers: Sequence[WorkerFigures], count: int) -> str:
    """One line about all workers."""
    step, seconds = min(one.step for one in workers), max(one.step_s for one in workers)
    stalled = max(one.stall_s for one in workers)
    whole = f"{len(workers)} of {count} workers" if len(workers) < count else f"{count} workers"
    return f"step {step:,}, {seconds:.3g} s a step, of which {stalled:.3g} s wait for the network; {whole}"
