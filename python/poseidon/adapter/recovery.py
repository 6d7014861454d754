"""Recovery: a training loop that goes on when a worker is lost, with the bits of one in which none was."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

from poseidon.adapter.agreement import check_same
from poseidon.adapter.control import Control
from poseidon.adapter.membership import Membership
from poseidon.adapter.own_versions import OwnVersions
from poseidon.adapter.snapshots import Snapshots, tell
from poseidon.adapter.state_text import broadcast
from poseidon.adapter.training_state import OwnState, TrainingState
from poseidon.adapter.versions import Versions
from poseidon.errors import Aborted, InvalidArgument, PeerLost, PoseidonError, PoseidonTimeout, Refused, Unreachable

SURVIVABLE = (PeerLost, Aborted, PoseidonTimeout, Unreachable, Refused)
"""What the failure of another process, or of the network, looks like here."""

_MOST_FAILURES = 10  # of the same members without getting any further: then it is no accident
_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class RecoveryEvent:
    """A generation of the job that began after a failure."""

    generation: int
    rank: int  # of this process in it
    world_size: int
    step: int  # with which training goes on
    replaced: tuple[int, ...]  # the ranks that are new processes
    seconds: float  # from the failure, as this process noticed it, until training goes on
    cause: str

    def __str__(self) -> str:
        new = f"new: rank {', '.join(map(str, self.replaced))}; " if self.replaced else ""
        return (
            f"rank {self.rank} of {self.world_size} goes on with step {self.step} in generation {self.generation}, "
            f"after {self.seconds:.2f} s; {new}cause: {self.cause}"
        )


class Recovery:
    """Trains in attempts. An attempt that fails because another worker is lost is made again, with its replacement.

    A framework derives its `Recovery` from it, with a `TrainingState` of its objects. The arguments are explained there
    and in docs/recovery.md. If workers may be replaced, it is collective: they meet here. Use it from the thread that
    trains.
    """

    def __init__(
        self, state: TrainingState, here: Membership, directory: str | os.PathLike[str] | None, every: int, keep: int
    ) -> None:
        self._context = here
        self._state = state
        self._versions = _versions(state, here, directory, every, keep)
        snapshots = directory is not None and self._versions is None
        self._snapshots = Snapshots(directory, keep, state.arrays) if directory is not None and snapshots else None
        self._every = every
        self._step = 0
        self._finished = 0  # `until` has said so on some rank
        self._is_new = True
        self._is_whole = False  # the state is that of the beginning of `_step`
        self._failures = 0  # since `_failed_step` was completed or a worker replaced
        self._failed_step = 0  # the furthest that has failed
        self._own_failure: PoseidonError | None = None  # of an attempt, other than by others' failures
        self._next_look = 0.0
        self._written = -1
        self.history: list[RecoveryEvent] = []
        self._drain = Drain()
        if here.recovers:
            self._drain.listen()
            self._form()
        elif isinstance(self._versions, OwnVersions):
            self._step, self._finished = self._versions.agree(self._context, all_new=True)
        elif self._snapshots is not None:
            self._resume()

    @property
    def step(self) -> int:
        """The number of complete steps: the step that comes next, or is being made.

        After a failure it is the same, one more if another rank was ahead, or one less with a DistributedOptimizer.
        With update="server" it is the step of the version to which all go back.
        """
        return self._step

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Goes around one training step: forward, backward, step(), and everything else that changes the objects.

        At its end the step is complete. If it fails because of another worker or the network, the workers meet again,
        agree on a step and its state, and the loop goes on with that `step`. Gradients are cleared at the beginning. An
        error of this worker's own passes through. The others then wait for this worker or its replacement.
        """
        while not self._survived(self._begin):
            pass
        try:
            yield
            if self._versions is not None:
                self._state.end()
        except SURVIVABLE as error:
            if not self._context.recovers:
                raise
            failure: PoseidonError = error.with_traceback(None)
        except BaseException as error:
            # Should the program catch it and go on, what this attempt has changed is put back first.
            self._own_failure = Aborted(f"an attempt of this rank itself failed: {type(error).__name__}: {error}")
            if isinstance(error, Exception):
                self._context.abort(error)
            raise
        else:
            self._step += 1
            if self._step > self._failed_step:  # those before it may be made again and again
                self._failures = 0
            return
        self._recover(failure)

    def until(self, step: int) -> bool:
        """Whether there are steps left before `step`.

        It is False when all ranks have completed them, with all updates. Then no rank goes back behind that step, and
        every rank may read parameters, save them or leave.
        """
        while self._step >= step > self._finished:
            self._survived(self._complete)
        return self._step < step

    def drain(self) -> None:
        """Asks this worker to end between two steps. Any thread may call it, for example one that waits for notices.

        The next attempt or `until` of this worker does not begin: what is in flight is completed, rank 0 writes a
        snapshot if there is a `directory`, the job is left in order, and SystemExit(143) is raised. The others go on
        as after a loss, from the same step. SIGTERM asks likewise, unless the program handles it. Raises
        InvalidArgument where nobody could go on: with on_failure=abort, or alone.
        """
        if not self._context.recovers:
            raise InvalidArgument(
                "drain() needs on_failure=rejoin or shrink and several workers, because otherwise nobody goes on: set "
                "on_failure, or end the program after a snapshot"
            )
        self._drain.ask()

    # An attempt.

    def _begin(self) -> None:
        here = self._context
        failure, self._own_failure = self._own_failure, None
        if failure is not None and here.recovers:
            raise failure
        if self._drain.asked:
            self._leave()
        self._state.begin(self._step, here.rank)
        # After a failure the next exchange tells it. Until then nobody is refused because a member seems to live.
        has_failed = here.client is not None and here.client.failure is not None
        if here.recovers and not has_failed and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_SECONDS
            if here.rank == 0 and (refused := here.newly_refused()):
                tell(refused)
            if here.someone_joins():
                here.end_generation("a worker joins, so the job's next generation begins")
                raise Aborted("a worker joins")
        if self._versions is not None:
            self._versions.take(self._step, self._finished, here.rank == 0)
        elif self._step % self._every == 0:
            self._write_snapshot()

    def _leave(self) -> None:
        """This worker has made the step before, with all others, and ends."""
        self._state.settle()
        if self._state.residuals() is None:  # otherwise a snapshot takes all ranks
            self._write_snapshot()
        rank = self._context.rank
        self._context.leave()  # when all others have contributed to that step, too
        tell(f"rank {rank} leaves before step {self._step}, because it was asked to end")
        self._drain.leave()

    def _complete(self) -> None:
        self._begin()
        self._state.settle()
        if isinstance(self._versions, OwnVersions):  # nobody goes back behind this step
            self._versions.complete(self._step, self._context)
        if self._context.control is not None:
            self._context.control.barrier()
        self._finished = self._step
        self._write_snapshot()

    def _survived(self, act: Callable[[], None]) -> bool:
        """Runs `act`. Returns False if it failed and training can go on, perhaps from another step."""
        try:
            act()
        except SURVIVABLE as error:
            if not self._context.recovers:
                raise
            failure = error.with_traceback(None)
        else:
            return True
        self._recover(failure)
        return False

    # After a failure.

    def _recover(self, failure: PoseidonError) -> None:
        began = time.monotonic()
        self._count(failure)
        self._state.note_residuals()
        self._context.leave()  # before the state is touched: nothing may be received into it any more
        step = -1 if self._versions is not None else self._state.whole_step(self._step)
        self._is_whole = step >= 0
        if self._is_whole:
            self._state.go_back(step)
            self._step = step
        replaced = self._form()
        here = self._context
        seconds = time.monotonic() - began
        generation = here.present_client.generation
        event = RecoveryEvent(generation, here.rank, here.world_size, self._step, replaced, seconds, str(failure))
        self.history.append(event)
        tell(str(event))

    def _count(self, failure: PoseidonError) -> None:
        self._failures += 1
        self._failed_step = max(self._failed_step, self._step)
        if self._failures > _MOST_FAILURES:
            raise failure

    def _form(self) -> tuple[int, ...]:
        """Joins the job's next generation, or the one after it if that fails, too. Returns the ranks that are new."""
        told: set[str] = set()
        while True:
            with self._drain.meeting():
                self._context.meet()
            try:
                self._context.prepare()
                return self._agree()
            except SURVIVABLE as error:
                self._count(error)
                reason = str(error).split("; flight record: ")[0]  # each time another one
                if reason not in told:
                    told.add(reason)
                    tell(f"rank {self._context.rank} tries again to agree with the others; cause: {error}")
            except PoseidonError as error:
                self._context.abort(error)
                raise

    def _agree(self) -> tuple[int, ...]:
        """Makes models, optimizers, the step and its state the same on all ranks. Collective."""
        state, control = self._state, self._context.control
        assert control is not None
        check_same(control, state.describe(), "Recovery")
        state.connect_models()
        decisions = state.decisions()
        own_step = self._step if self._is_whole else -1
        counted = [self._failures, self._failed_step, self._written]
        rows = control.one_hot([own_step, self._finished, int(self._is_new), *counted, *decisions])
        if self._versions is not None:
            self._step, finished = self._versions.agree(self._context, all_new=all(row[2] for row in rows))
            self._finished = max([finished, *(row[1] for row in rows)])
        else:
            self._agree_on_state(control, [row[0] for row in rows], [bool(row[2]) for row in rows])
            self._finished = max([self._finished, *(row[1] for row in rows if row[0] == self._step)])
        most = [max(column) for column in zip(*rows, strict=True)]
        self._failures, self._failed_step, self._written = most[3:6]  # so that all give up and write together
        state.resume(self._step, most[6:])
        if not isinstance(self._versions, OwnVersions):
            control.on_exchange = state.check_exchange
        replaced = tuple(rank for rank, row in enumerate(rows) if row[2])
        self._is_new, self._is_whole = False, True
        if replaced:
            self._failures = 0
        return replaced

    def _agree_on_state(self, control: Control, steps: Sequence[int], are_new: Sequence[bool]) -> None:
        """Agrees on a state. `steps` has the step of each rank's state, or -1 if the rank has none."""
        rank = self._context.rank
        step = max(steps)
        if step >= 0:
            if any(are_new) and self._load_snapshot_for_residuals(control):
                return
            root = steps.index(step)
            if min(steps) < step:
                state = broadcast(self._collect() if rank == root else None, control, root)
                if steps[rank] < step:
                    self._load(state)
            return
        if not all(are_new):
            raise PoseidonError(
                "no remaining worker has the state of a complete step; end all workers and start them again"
            )
        found = self._newest_snapshot()
        state = broadcast(found or self._collect() if rank == 0 else None, control, 0)
        if rank != 0 or found is not None:
            self._load(state)

    def _load_snapshot_for_residuals(self, control: Control) -> bool:
        """Whether all go back to the newest snapshot: only that has what a lost rank had not sent by lossy schemes."""
        if self._state.residuals() is None or self._context.settings.on_failure != "rejoin":
            return False
        state = broadcast(self._newest_snapshot() or {} if self._context.rank == 0 else None, control, 0)
        if not state:
            return False
        self._load(state)
        return True

    # Snapshots.

    def _collect(self) -> dict[str, Any]:
        return {"step": self._step, "finished": self._finished, **self._state.collect(self._step)}

    def _load(self, state: dict[str, Any]) -> None:
        self._state.load(state, state["step"])
        self._step, self._finished = state["step"], state["finished"]
        if "residuals" in state:  # by rank
            rank, own = self._context.rank, state["residuals"]
            if rank == 0 and len(own) > self._context.world_size:
                tell(
                    f"the snapshot is of {len(own)} ranks and the job has {self._context.world_size}: what the others' "
                    "lossy schemes or wire formats had not sent is lost"
                )
            self._state.take_residuals(self._state.arrays.bytes_of(own[rank]) if rank < len(own) else None)

    def _write_snapshot(self) -> None:
        if self._snapshots is None or self._step <= self._written:
            return
        self._state.settle()
        residuals = self._all_residuals()
        if self._step == 0 and not residuals:
            return  # the state of a start can be made again
        if self._context.rank == 0:
            self._snapshots.write(self._step, {**self._collect(), **residuals})
        self._written = self._step

    def _all_residuals(self) -> dict[str, Any]:
        """What the ranks have not sent by lossy schemes, by rank; empty if there are no such schemes. Collective."""
        own, control, arrays = self._state.residuals(), self._context.control, self._state.arrays
        if own is None or control is None:
            return {}
        rows = control.gather(own)
        return {"residuals": [arrays.make(("uint8", (row.size,)), bytearray(row)) for row in rows]}

    def _newest_snapshot(self) -> dict[str, Any] | None:
        if self._snapshots is None or self._context.rank != 0:
            return None
        state = self._snapshots.newest()
        if state is not None:
            self._written = state["step"]
        return state

    def _resume(self) -> None:
        """Makes all ranks start from rank 0's newest snapshot, if it has one. For jobs without generations."""
        state, control = self._newest_snapshot(), self._context.control
        if control is not None:
            if not control.sum([int(state is not None)])[0]:
                return
            state = broadcast(state, control, 0)
        if state is not None:
            self._load(state)
            self._written = self._step  # on all ranks: to write a snapshot may be collective
            self._state.resume(self._step, self._state.decisions())


def _versions(
    state: TrainingState, here: Membership, directory: str | os.PathLike[str] | None, every: int, keep: int
) -> Versions | OwnVersions | None:
    """What all ranks go back to together, where a rank's state cannot be given by another."""
    if isinstance(state, OwnState):
        if directory is not None:
            return OwnVersions(state, directory, every, keep)
        here.features.check("local_sgd_unsaved")
        return None
    if not here.recovers or not state.on_servers:
        return None
    if directory is not None:
        raise InvalidArgument(
            "with update='server' everything is saved in checkpoint_dir, every checkpoint_every steps: leave "
            "directory out of Recovery"
        )
    return Versions(state, here.settings)


EXIT_STATUS = 128 + signal.SIGTERM
"""Of a worker that has left because it was asked to: what a shell reports for one that SIGTERM has ended."""


class Drain:
    """Whether this process has been asked to end: by SIGTERM, unless the program handles that itself, or by `ask`."""

    def __init__(self) -> None:
        self.asked = False
        self._meeting = False

    def listen(self) -> None:
        """From now on SIGTERM asks. Only the main thread can set that, and only for a signal that nobody handles."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_signal)

    def ask(self) -> None:
        """Any thread, any time."""
        self.asked = True

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Around waiting for the members of a generation, which ends at once when SIGTERM comes, as it may be long."""
        if self.asked:
            self.leave()
        self._meeting = True
        try:
            yield
        finally:
            self._meeting = False

    def leave(self) -> NoReturn:
        """Ends this process, as far as the program does not mind."""
        raise SystemExit(EXIT_STATUS)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.ask()
        if self._meeting:
            self.leave()
