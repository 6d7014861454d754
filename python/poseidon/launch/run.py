"""One run: its workers, until the last of them has ended."""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from poseidon import failure_marks as marks
from poseidon.launch.lines import MOST_LINE_BYTES
from poseidon.launch.outcome import Failure, Outcome, Recovery
from poseidon.launch.signals import Signals
from poseidon.launch.terminal import Terminal
from poseidon.launch.workers import Reader, Worker, Workplace

GRACE_SECONDS = 5.0  # between the steps of ending workers
_POLL_SECONDS = 0.05
_DRAIN_SECONDS = 1.0  # for output of processes that a worker left behind

OnLine = Callable[[int, str], None]


class Run:
    """One run: starts the workers, passes their output on and ends them. It uses one thread, and the terminal's."""

    def __init__(
        self,
        count: int,
        workplace: Workplace,
        marks_folder: Path,
        on_line: OnLine | None,
        signals: Signals,
        terminal: Terminal,
        recovery: Recovery,
    ) -> None:
        self._count = count
        self._workplace = workplace
        self._marks_folder = marks_folder
        self._recovery = recovery
        self._on_line = on_line
        self._signals = signals
        self._terminal = terminal
        self._workers: list[Worker] = []
        self._selector = selectors.DefaultSelector()
        self._outcome = Outcome(codes=[0] * count, restart_counts=[0] * count)
        self._has_begun = False  # some rank has been a member of the job
        self._finished = False  # one of them, so that the job is over
        self._failures: list[tuple[Failure, int]] = []  # that end the run, and when each was seen
        self._ladder: list[tuple[float, int]] = []  # when to send which signal to those that still run

    def run(self) -> Outcome:
        """Returns when all workers have ended. None of them outlives the call, however it ends."""
        try:
            for rank in self._workplace.ranks():
                if not self._signals.received:
                    self._start(rank)
            self._react_to_signals()
            while self._running():
                self._pass_output(_POLL_SECONDS)
                self._workplace.look()
                self._collect()
                self._start_arrivals()
                self._end_replacements_for_nobody()
                self._react_to_signals()
                self._climb_ladder()
            self._workplace.finish()
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

    def _running(self) -> list[Worker]:
        return [worker for worker in self._workers if not worker.ended]

    def _start(self, rank: int, replaces: Failure | None = None) -> None:
        self._outcome.last_errors[rank] = ""
        self._workers.append(self._workplace.start(rank, replaces, self))

    def _start_arrivals(self) -> None:
        for rank in self._workplace.arrivals():
            if not self._outcome.interrupted_by and not self._failures and not self._has_ended():
                marks.forget(self._mark_of(rank))
                self._start(rank)

    def attach(self, file: IO[bytes], reader: Reader) -> None:
        """See `Output`."""
        self._selector.register(file, selectors.EVENT_READ, reader)

    def show(self, rank: int, text: str, stream: IO[str]) -> None:
        """See `Output`."""
        if stream is sys.stderr:
            self._outcome.last_errors[rank] = text.strip() or self._outcome.last_errors[rank]
        if self._on_line is not None:
            self._on_line(rank, text.encode(errors="surrogateescape").decode(errors="replace"))
        else:
            self._terminal.show(self._prefix(rank), text, stream)

    def _prefix(self, rank: int) -> str:
        host = self._workplace.host_of(rank)
        return f"[{rank} {host}] " if host else f"[{rank}] " if rank else ""

    def _pass_output(self, wait_seconds: float) -> bool:
        """Returns whether it could. Nobody reads what was passed on before, if it could not."""
        if self._terminal.waits_for_reader(wait_seconds):
            return False
        for key, _ in self._selector.select(wait_seconds):
            if data := os.read(key.fd, MOST_LINE_BYTES):
                key.data.feed(data)
            else:
                key.data.close()
                self._selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
        return True

    def _collect(self) -> None:
        now_ns = time.monotonic_ns()
        for worker in self._running():
            if worker.ended or not worker.has_ended():  # the first: with the rest of its replica
                continue
            code = self._outcome.codes[worker.rank] = worker.reap()
            if self._workplace.is_dismissed(worker.rank):
                self._outcome.codes[worker.rank] = 0
                marks.forget(self._mark_of(worker.rank))
                continue
            self._finished |= code == 0
            if code == 0 or self._outcome.interrupted_by:
                continue
            failure = Failure(worker.rank, code, self._workplace.host_of(worker.rank), worker.lost)
            if not self._failures:
                self._react_to_failure(failure, now_ns)
            elif worker.rank not in self._outcome.ended_ranks:
                self._failures.append((failure, now_ns))

    def _react_to_failure(self, failure: Failure, now_ns: int) -> None:
        rank, most = failure.rank, self._recovery.most_restarts
        what = f"{failure.who} failed, {failure.how}"
        evicted = marks.tells_of_eviction(self._mark_of(rank))
        ended = self._has_ended()
        misused = marks.tells_of_misuse(self._mark_of(rank))
        hopeless = not ended and (misused or self._would_fail_again(failure))
        if hopeless and most > 0:
            why = "asking for what cannot be" if misused else "before any rank was a member of the job"
            self._terminal.tell(f"{what}, {why}: it would fail again, so the run ends")
        if not ended and not hopeless and not evicted and self._outcome.restart_counts[rank] < most:
            self._outcome.restart_counts[rank] += 1
            whom = "all ranks of its replica are" if self._recovery.together else "it is"
            count = self._outcome.restart_counts[rank]
            self._terminal.tell(f"{what}; {whom} started again (restart {count} of {most})")
            self._start_again(failure)
        elif self._spares(failure) and not hopeless and (ended or self._others_run(failure)):
            self._end(self._companions(failure))
            self._terminal.tell(
                f"{what}; it is not started again, {'the run has ended' if ended else 'the others go on'}"
            )
        else:
            self._failures.append((failure, now_ns))
            if most > 0 and self._said_to_have_ended():
                return  # the others need nobody any more, and may take long to save what they have
            # The others normally notice the loss and end with an error of their own that says more. That a machine
            # says nothing any more they take for an outage that may end (docs/decisions/0031-heartbeats.md).
            now = time.monotonic() - (GRACE_SECONDS if failure.lost else 0.0)
            self._ladder = [(now + GRACE_SECONDS, signal.SIGTERM), (now + 2 * GRACE_SECONDS, signal.SIGKILL)]

    def _start_again(self, failure: Failure) -> None:
        ranks = self._companions(failure)
        self._end(ranks)
        for rank in ranks:
            marks.forget(self._mark_of(rank))
            self._start(rank, failure)

    def _companions(self, failure: Failure) -> list[int]:
        """The rank, and those that cannot go on without it: a replica is one machine."""
        if not self._recovery.together:
            return [failure.rank]
        return [rank for rank in self._ranks() if self._workplace.host_of(rank) == failure.host]

    def _spares(self, failure: Failure) -> bool:
        needed = self._recovery.spares_workers and self._workplace.is_needed(failure.rank)
        if needed and not self._has_ended():
            self._terminal.tell(f"the others cannot go on: they meet at the machine of {failure.who}")
        return self._recovery.spares_workers and not needed

    def _others_run(self, failure: Failure) -> bool:
        companions = self._companions(failure)
        return any(worker.rank not in companions for worker in self._running())

    def _end(self, ranks: Sequence[int]) -> None:
        for worker in [one for one in self._running() if one.rank in ranks]:
            worker.reap()

    def _would_fail_again(self, failure: Failure) -> bool:
        """Whether it failed by its script's own doing before the job began, as by an import of a missing module."""
        self._has_begun |= any(map(marks.is_member, map(self._mark_of, self._ranks())))
        return not self._has_begun and failure.code > 0 and not marks.tells_of_network(self._mark_of(failure.rank))

    def _end_replacements_for_nobody(self) -> None:
        """Ends replacements that have not met the others before the run has ended: they would train alone, or wait."""
        waiting = [one for one in self._running() if one.replaces and not marks.is_member(self._mark_of(one.rank))]
        if not waiting or not self._has_ended() or not any(map(marks.is_member, map(self._mark_of, self._ranks()))):
            return  # a program that is no job of Poseidon's may do without the others
        for worker in waiting:
            assert worker.replaces is not None
            failure = worker.replaces
            worker.reap()
            self._outcome.codes[worker.rank] = failure.code
            self._terminal.tell(
                f"{failure.who} does not go on: the run has ended without it, as it failed, {failure.how}"
            )
            if not self._recovery.spares_workers:
                self._failures.append((failure, time.monotonic_ns()))

    def _has_ended(self) -> bool:
        """Whether a worker has come to the end, so that a replacement would find nobody."""
        return self._finished or self._said_to_have_ended()

    def _said_to_have_ended(self) -> bool:
        return any(map(marks.tells_of_end, map(self._mark_of, self._ranks())))

    def _ranks(self) -> range:
        return range(self._count)

    def _first_failure(self) -> Failure | None:
        """The worker that failed first by itself, if there is one. A signal leaves no mark, but it is quick."""

        def order(seen: tuple[Failure, int]) -> tuple[bool, int, bool]:
            failure, ended_ns = seen
            return *marks.mark_order(self._mark_of(failure.rank), ended_ns), failure.code > 0

        return min(self._failures, key=order)[0] if self._failures else None

    def _mark_of(self, rank: int) -> Path:
        return self._marks_folder / str(rank)

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
            if not self._pass_output(_POLL_SECONDS):
                deadline = time.monotonic() + _DRAIN_SECONDS
            self._react_to_signals()
