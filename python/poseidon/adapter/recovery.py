"""Recovery: a training loop that goes on when a worker is lost, with the bits of one in which none was."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from poseidon.adapter.agreement import check_same
from poseidon.adapter.control import Control
from poseidon.adapter.drain import Drain
from poseidon.adapter.membership import Membership
from poseidon.adapter.own_versions import OwnVersions
from poseidon.adapter.shard_group import OtherReplicas
from poseidon.adapter.snapshots import Snapshots, tell
from poseidon.adapter.state_text import broadcast
from poseidon.adapter.training_state import OwnState, TrainingState
from poseidon.adapter.unfit import UnfitNewcomers, unfit_newcomers
from poseidon.adapter.versions import Versions
from poseidon.errors import SURVIVABLE, Aborted, InvalidArgument, PoseidonError

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


@dataclass
class _Agreed:
    """What the ranks of a generation have agreed on, before any of them has changed something."""

    step: int
    finished: int
    members: list[tuple[int, int]]  # by rank: the slot, and the number of its replica's meeting
    are_new: list[bool]  # by rank
    counted: list[int]  # failures, the furthest step that has failed, the step of the last snapshot
    decisions: list[int]
    state: dict[str, Any] | None = None  # that this rank is to take over

    def take(self, state: dict[str, Any], needed: bool) -> None:
        """All go on from this state, which this rank `needed` or has."""
        self.step, self.finished, self.state = state["step"], state["finished"], state if needed else None


class Recovery:
    """Trains in attempts. An attempt that fails because another worker is lost is made again, with its replacement.

    A framework derives its `Recovery` from it, with a `TrainingState` of its objects. The arguments are explained there
    and in docs/recovery.md. If workers may be replaced, it is collective: they meet here. Use it from the thread that
    trains.
    """

    def __init__(
        self, state: TrainingState, here: Membership, directory: str | os.PathLike[str] | None, every: int, keep: int
    ) -> None:
        if every < 1:
            raise InvalidArgument(f"every is {every}: a snapshot is written after one step or more")
        self._context = here
        self._state = state
        here.recovery_count += 1
        self._number = here.recovery_count
        self._shards = here.shard_group if here.recovers else None  # with which this rank makes each step
        self._meeting = 0
        self._wishes = [False, False]  # of some rank among them: to take in a worker, to leave
        if self._shards is not None:
            _check_directory(directory)
            # The others of this shard wait for what this rank does not send any more.
            self._shards.on_void = lambda failure: here.end_generation(f"an attempt of this rank is void: {failure}")
        self._versions = _versions(state, here, directory, every, keep)
        snapshots = directory is not None and self._versions is None
        self._snapshots = Snapshots(directory, keep, state.arrays) if directory is not None and snapshots else None
        self._every = every
        self._step = 0
        self._finished = 0  # `until` has said so on some rank
        self._is_new = True
        self._is_whole = False  # the state is that of the beginning of `_step`
        self._state_of = 0  # the generation in which this process took its state, or agreed with the others on it
        self._failures = 0  # since `_failed_step` was completed or a worker replaced
        self._failed_step = 0  # the furthest that has failed
        self._own_failure: PoseidonError | None = None  # of an attempt, other than by others' failures
        self._next_look = 0.0
        self._written = -1
        self.history: list[RecoveryEvent] = []
        self._drain = Drain()
        if here.recovers:
            self._drain.listen()
            if self._shards is not None:
                self._shards.agree(None)  # others find all of the replica, or none
            self._form()
            most = here.settings.world_size
            if here.rank == 0 and here.world_size < most and self._step == 0:
                tell(f"the job begins with {here.world_size} of up to {most} workers; others join as they come")
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
        failure: PoseidonError | None = None
        self._context.in_attempt = True
        try:
            yield
            self._state.end()
        except BaseException as error:
            failure = self._state.failure_of(error)
            if failure is None:
                self._fail(error)
                raise
            if not self._context.recovers:
                raise
            failure = failure.with_traceback(None)
        finally:
            self._context.in_attempt = False
        if self._shards is not None:
            failure, self._wishes = self._shards.end(failure, [self._someone_joins(), self._drain.asked])
        if failure is None:
            self._step += 1
            if self._step > self._failed_step:  # those before it may be made again and again
                self._failures = 0
        else:
            self._recover(failure)

    def until(self, step: int) -> bool:
        """Whether there are steps left before `step`.

        It is False when all ranks have completed them, with all updates. Then no rank goes back behind that step, and
        every rank may read parameters, save them or leave.
        """
        while self._step >= step > self._finished:
            if self._survived(self._complete, together=True):
                self._finished = self._step
                self._survived(self._write_snapshot)
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
        joins, leaves = (self._someone_joins(), self._drain.asked) if self._shards is None else self._wishes
        if leaves:
            self._leave()
        self._state.begin(self._step, here.data_part[0])
        if joins:
            self._wishes = [False, False]
            here.end_generation("a worker joins, so the job's next generation begins")
            raise Aborted("a worker joins")
        if self._shards is not None:
            self._shards.begin()
        if self._versions is not None:
            self._versions.take(self._step, self._finished, here.rank == 0)
        elif self._step % self._every == 0:
            self._write_snapshot()

    def _fail(self, error: BaseException) -> None:
        """This rank's attempt has failed by an error of its own."""
        # Should the program catch it and go on, what this attempt has changed is put back first.
        self._own_failure = Aborted(f"an attempt of this rank itself failed: {type(error).__name__}: {error}")
        if isinstance(error, Exception):
            self._context.abort(error)
            if self._shards is not None:
                self._shards.abort(error)

    def _someone_joins(self) -> bool:
        """Whether a worker waits to be taken in. It looks once in a while."""
        here = self._context
        # After a failure the next exchange tells it. Until then nobody is refused because a member seems to live.
        has_failed = here.client is not None and here.client.failure is not None
        if not here.recovers or has_failed or time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + _LOOK_SECONDS
        if here.rank == 0 and (refused := here.newly_refused()):
            tell(refused)
        return here.someone_joins()

    def _leave(self) -> None:
        """This worker has made the step before, with all others, and ends."""
        self._state.settle()
        if self._state.residuals() is None:  # otherwise a snapshot takes all ranks
            self._write_snapshot()
        rank = self._context.rank
        self._context.note_leaving()
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

    def _survived(self, act: Callable[[], None], together: bool = False) -> bool:
        """Runs `act`. Returns False if it failed and training can go on, perhaps from another step.

        `together`: it may fail on one rank of a replica alone.
        """
        failure: PoseidonError | None = None
        try:
            act()
        except SURVIVABLE as error:
            if not self._context.recovers:
                raise
            failure = error.with_traceback(None)
        if together and self._shards is not None:
            failure, _ = self._shards.end(failure)
        if failure is not None:
            self._recover(failure)
        return failure is None

    # After a failure.

    def _recover(self, failure: PoseidonError) -> None:
        began = time.monotonic()
        self._wishes = [False, False]  # the next meeting takes in who waits, and the next vote asks again who leaves
        self._count(failure)
        self._state.note_residuals()
        self._context.leave()  # before the state is touched: nothing may be received into it any more
        steps = [] if self._versions is not None else self._state.whole_steps(self._step)
        step = max(steps, default=-1) if self._shards is None else self._shards.common_step(steps, self._step)
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
            failure, agreed = self._meet()
            if agreed is not None and failure is None:
                return self._adopt(agreed)
            assert failure is not None
            if not isinstance(failure, OtherReplicas | UnfitNewcomers):
                self._count(failure)
            reason = str(failure).split("; flight record: ")[0]  # each time another one
            if reason not in told:
                told.add(reason)
                tell(f"rank {self._context.rank} tries again to agree with the others; cause: {failure}")

    def _meet(self) -> tuple[PoseidonError | None, _Agreed | None]:
        """Meets the members of the next generation. Returns what failed, or what all have agreed on."""
        shards = self._shards
        if shards is None:
            return self._meet_once()
        self._meeting = shards.next_meeting()
        failure, agreed = self._meet_once()
        while True:
            failure, behind = shards.compare(failure, *((-1, []) if agreed is None else (agreed.step, agreed.members)))
            if failure is not None or not behind:
                return failure, agreed
            if shards.rank in behind:
                failure, agreed = self._meet_once()

    def _meet_once(self) -> tuple[PoseidonError | None, _Agreed | None]:
        with self._drain.meeting():
            self._context.meet()
        are_new: list[bool] = []
        try:
            self._context.prepare()
            are_new += [bool(row[0]) for row in self._context.present_control.one_hot([int(self._is_new)])]
            return None, self._agree(are_new)
        except SURVIVABLE as error:
            return error, None
        except PoseidonError as error:
            unfit = unfit_newcomers(error, are_new)
            if unfit and not self._is_new:
                return UnfitNewcomers.of(unfit, error), None
            self._context.note_leaving() if unfit else self._context.abort(error)
            raise

    def _agree(self, are_new: list[bool]) -> _Agreed:
        """What the ranks of the next generation agree on, so that all have the same state. Collective."""
        here, state, control = self._context, self._state, self._context.present_control
        size = "" if self._shards is None else f"{self._shards.size} ranks in a replica; "
        # A replacement begins with the program's first one.
        check_same(control, f"{size}number {self._number} of the program\n{state.describe()}", "Recovery")
        state.connect_models()
        state.agree()
        decisions = state.decisions()
        own_step = self._step if self._is_whole else -1
        counted = [self._failures, self._failed_step, self._written]
        mine = [own_step, self._finished, self._state_of, here.settings.rank, self._meeting, *counted, *decisions]
        rows = control.one_hot(mine)
        most = [max(column) for column in zip(*rows, strict=True)]
        members = [(row[3], row[4]) for row in rows]
        agreed = _Agreed(self._step, most[1], members, are_new, most[5:8], most[8:])
        if self._versions is not None:
            agreed.step, finished = self._versions.agree(here, all_new=all(are_new))
            agreed.finished = max(finished, most[1])
        else:
            # A rank that was not in the last generation may be at the same step with another state.
            last = max((row[2] for row in rows if row[0] >= 0), default=0)
            self._agree_on_state(control, agreed, [row[0] if row[2] == last else -1 for row in rows])
            counts = [row[1] for row in rows if row[2] == last and row[0] == agreed.step]
            agreed.finished = max([agreed.finished, *counts])
        return agreed

    def _adopt(self, agreed: _Agreed) -> tuple[int, ...]:
        """Makes it the state of this rank. Returns the ranks that are new."""
        self._failures, self._failed_step, self._written = agreed.counted  # so that all give up and write together
        if agreed.state is not None:
            self._load(agreed.state)
        self._step, self._finished = agreed.step, agreed.finished
        with suppress(*SURVIVABLE):  # others have adopted it, and the next attempt finds the failure
            self._state.resume(self._step, agreed.decisions)
        if not isinstance(self._versions, OwnVersions):
            self._context.present_control.on_exchange = self._state.check_exchange
        self._is_new, self._is_whole = False, True
        self._state_of = self._context.present_client.generation
        if any(agreed.are_new):
            self._failures = 0
        return tuple(rank for rank, is_new in enumerate(agreed.are_new) if is_new)

    def _agree_on_state(self, control: Control, agreed: _Agreed, steps: Sequence[int]) -> None:
        """Agrees on a state. `steps` has the step of each rank's state, or -1 if the rank has none."""
        rank = self._context.rank
        agreed.step = step = max(steps)
        agreed.finished = self._finished
        if step >= 0:
            if any(agreed.are_new) and self._state_for_residuals(control, agreed):
                return
            root = steps.index(step)
            if min(steps) < step:
                state = broadcast(self._collect() if rank == root else None, control, root)
                agreed.take(state, needed=steps[rank] < step)
            return
        if not all(agreed.are_new):
            raise PoseidonError(
                "no remaining worker has the state of a complete step; end all workers and start them again"
            )
        found = self._newest_snapshot()
        state = broadcast(found or self._collect() if rank == 0 else None, control, 0)
        agreed.take(state, needed=rank != 0 or found is not None)

    def _state_for_residuals(self, control: Control, agreed: _Agreed) -> bool:
        """Whether all go back to the newest snapshot: only that has what a lost rank had not sent by lossy schemes."""
        if self._state.residuals() is None or self._context.settings.on_failure != "rejoin":
            return False
        state = broadcast(self._newest_snapshot() or {} if self._context.rank == 0 else None, control, 0)
        if not state:
            return False
        agreed.take(state, needed=True)
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


def _check_directory(directory: str | os.PathLike[str] | None) -> None:
    """InvalidArgument for snapshots that the ranks of a replica could not go back to together."""
    if directory is not None:
        raise InvalidArgument(
            "directory has the whole state of one rank, and with the option replica each has a shard: leave directory "
            "out, and save by torch.distributed.checkpoint"
        )
