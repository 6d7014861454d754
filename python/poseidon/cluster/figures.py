"""What the workers of a run show of themselves (live.py): for `poseidon top` here, and as a line of progress."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Sequence

from poseidon.cluster.machine import Machine
from poseidon.launch.terminal import Terminal
from poseidon.live import Board, WorkerFigures


class Figures:
    """Shows the figures that have come from the machines."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._at_terminal = sys.stderr.isatty()
        self._boards: dict[int, Board] = {}

    def show(self, machines: Sequence[Machine], count: int) -> None:
        """Shows what has come. `count`: how many workers there shall be."""
        workers = []
        for fields, shown_here in [(one, machine.shows_figures) for machine in machines for one in machine.figures]:
            with contextlib.suppress(ValueError, TypeError, KeyError, OSError):
                worker = WorkerFigures.from_json(fields)
                workers.append(worker)
                if shown_here:
                    self._board(worker.rank).write(worker)
        for rank in set(self._boards) - {worker.rank for worker in workers}:
            self._boards.pop(rank).close()
        if workers and self._at_terminal:
            self._terminal.show_progress(progress(workers, count))

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
    text = f"step {step:,}, {seconds:.3g} s a step, of which {stalled:.3g} s wait for the network; {whole}"
    return text[: shutil.get_terminal_size().columns - 1]
