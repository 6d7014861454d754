"""Figures of a job's steps while it runs, for those who watch it (poseidon.live)."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import warnings
from collections.abc import Callable, Sequence

from poseidon import _core
from poseidon.adapter.stats import BackwardPass, LayerSynchronization, StepRecord
from poseidon.live import Board, LayerFigures, LinkMeter, WorkerFigures

# It looks at all layers and connections, which takes a millisecond: not oftener than that, nor much more seldom.
_LEAST_SECONDS, _MOST_SECONDS = 0.5, 2.0


class Meter:
    """Counts the steps of one generation of a job, and shows them from time to time on this machine.

    The ranks show the same steps: those whose number is a multiple of a power of two.
    """

    def __init__(self, job: str, client: _core.Client) -> None:
        self._job, self._client = job, client
        self._steps = 0
        self._waited_ns = 0
        self._stride = 1
        self._shown = (0, 0, time.monotonic_ns())  # steps, and time waited, as of when
        self._links = LinkMeter()
        # The newest figures, which are at most about two seconds or one step old; None before there are any.
        self.latest: WorkerFigures | None = None
        self._board: Board | None = None
        self._pid = os.getpid()
        self._try(self._open)

    def step_finished(self, run: BackwardPass) -> None:
        """The gradients of a step have all arrived."""
        self._steps += 1
        self._waited_ns += run.waited_ns
        if self._steps % self._stride:
            return
        layers = StepRecord.of(run, self._client).layers
        seconds = self.show(self._steps, self._waited_ns, layers, time.monotonic_ns())
        if seconds < _LEAST_SECONDS:
            self._stride *= 2
        elif seconds > _MOST_SECONDS and self._stride > 1:
            self._stride //= 2

    def show(self, steps: int, waited_ns: int, layers: Sequence[LayerSynchronization], now_ns: int) -> float:
        """Shows the job after so many steps, for whose results training has waited so long in all.

        `layers` are those of the last one, which was over at `now_ns`. Returns the seconds since the figures before.
        Without a step since then nothing changes.
        """
        if steps == self._shown[0]:
            return 0.0
        self._steps, self._waited_ns = steps, waited_ns
        self.latest = self._figures(layers, now_ns)
        self._try(self._write)
        seconds = (now_ns - self._shown[2]) / 1e9
        self._shown = (steps, waited_ns, now_ns)
        return seconds

    def close(self) -> None:
        """Shows nothing any more."""
        board, self._board = self._board, None
        if board is not None and self._pid == os.getpid():
            with contextlib.suppress(OSError):
                board.close()

    def _figures(self, layers: Sequence[LayerSynchronization], now_ns: int) -> WorkerFigures:
        steps, waited_ns, since_ns = self._shown
        count, client = self._steps - steps, self._client
        traffic = client.traffic()
        return WorkerFigures(
            job=self._job,
            run=client.run,
            rank=client.rank,
            world_size=client.world_size,
            generation=client.generation,
            host=socket.gethostname(),
            pid=self._pid,
            written_at=time.time(),
            step=self._steps,
            step_s=(now_ns - since_ns) / count / 1e9,
            stall_s=(self._waited_ns - waited_ns) / count / 1e9,
            stalled_total_s=self._waited_ns / 1e9,
            bytes_sent=traffic.bytes_sent,
            bytes_received=traffic.bytes_received,
            plain_bytes_sent=traffic.plain_bytes_sent,
            plain_bytes_received=traffic.plain_bytes_received,
            layers=tuple(
                LayerFigures(layer.name, layer.scheme, layer.bytes_sent, layer.bytes_received, layer.seconds)
                for layer in layers
            ),
            links=self._links.links(),
        )

    def _open(self) -> None:
        self._board = Board()

    def _write(self) -> None:
        if self._board is not None and self.latest is not None:
            self._board.write(self.latest)

    def _try(self, act: Callable[[], None]) -> None:
        """Training goes on where nobody can watch it."""
        try:
            act()
        except OSError as error:
            self.close()
            warnings.warn(f"`poseidon top` cannot show this worker: {error}", stacklevel=2)
