"""The machines of a run, as `Run` uses them: starts workers there, and connects again to one that was lost."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from poseidon.cluster.figures import Figures
from poseidon.cluster.growth import Growth
from poseidon.cluster.machine import LOST, Machine, RemoteWorker, Seat
from poseidon.launch.outcome import Failure
from poseidon.launch.terminal import Terminal
from poseidon.launch.workers import Output, Worker

_FIGURES_S = 1.0
_AGAIN_S = 2.0  # between two tries to connect
_MOST_AGAIN_S = 60.0  # for all tries


@dataclass
class _Waiting:
    """Workers of a machine that has to be connected to first."""

    until: float
    next_try: float
    workers: list[RemoteWorker] = field(default_factory=list)


class Machines:
    """See `Workplace`. `seats` by rank; `growth` changes them and the machines, where those come and go."""

    def __init__(
        self,
        machines: Sequence[Machine],
        seats: Mapping[int, Seat],
        program: Sequence[str],
        marks_folder: Path,
        terminal: Terminal,
        growth: Growth | None = None,
    ) -> None:
        self._machines = machines
        self._seats = seats
        self._program = list(program)
        self._marks_folder = marks_folder
        self._terminal = terminal
        self._growth = growth
        self._output: Output | None = None
        self._figures_at = 0.0
        self._waiting: dict[str, _Waiting] = {}
        self._figures = Figures(terminal)
        self._finished = False

    def ranks(self) -> Sequence[int]:
        """See `Workplace`."""
        return sorted(self._seats)

    def arrivals(self) -> Sequence[int]:
        """See `Workplace`."""
        return () if self._growth is None else self._growth.take_arrivals()

    def is_dismissed(self, rank: int) -> bool:
        """See `Workplace`."""
        return self._growth is not None and rank in self._growth.dismissed

    def is_needed(self, rank: int) -> bool:
        """See `Workplace`. The others meet at rank 0's address, which no other machine can take over."""
        return rank == 0 and (len(self._machines) > 1 or self._growth is not None)

    def start(self, rank: int, replaces: Failure | None, output: Output) -> Worker:
        """See `Workplace`."""
        if self._output is None:
            self._output = output
            for one in self._machines:
                self._set_up(one)
        machine = self._seats[rank].machine
        worker = RemoteWorker(rank, machine, output, self._marks_folder / str(rank), replaces)
        if machine.connection.is_open and machine.name not in self._waiting:
            machine.start(worker, rank, self._seats[rank].environment)
        else:
            now = time.monotonic()
            waiting = self._waiting.setdefault(machine.name, _Waiting(now + _MOST_AGAIN_S, now))
            worker.waits = machine.is_awaited = True
            waiting.workers.append(worker)
        return worker

    def host_of(self, rank: int) -> str:
        """See `Workplace`."""
        return self._seats[rank].machine.name

    def look(self) -> None:
        """See `Workplace`."""
        now = time.monotonic()
        unread = self._terminal.waits_for_reader(0.0)
        for machine in list(self._machines):
            if unread:  # so what it has said may not have been read
                machine.connection.heard_at = now
            machine.keep()
            self._look_after(machine, now)
        if now >= self._figures_at:
            self._figures_at = now + _FIGURES_S
            self._figures.show(self._machines, len(self._seats))
            if self._growth is not None and self._output is not None and not self._finished:
                self._growth.look(now, self._output)

    def finish(self) -> None:
        """See `Workplace`."""
        self._finished = True
        for machine in self._machines:
            machine.connection.hang_up()
        if self._growth is not None:
            self._growth.finish()
        self._figures.close()

    def _set_up(self, machine: Machine) -> None:
        assert self._output is not None
        for file, reader in machine.connection.files:
            if not file.closed:
                self._output.attach(file, reader)
        machine.set_up(self._program)

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
            machine.is_awaited = False
            for worker in waiting.workers:
                worker.exit(LOST, lost=True)
        elif now >= waiting.next_try:
            waiting.next_try = now + _AGAIN_S
            machine.redial()
            self._set_up(machine)

    def _start_waiting(self, machine: Machine) -> None:
        """Once the agent speaks."""
        if machine.name in self._waiting and machine.connection.speaks:
            machine.is_awaited = False
            for worker in self._waiting.pop(machine.name).workers:
                if worker.waits:
                    worker.waits = False
                    machine.start(worker, worker.rank, self._seats[worker.rank].environment)
