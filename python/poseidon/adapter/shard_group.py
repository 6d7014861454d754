"""The ranks of one replica of a sharded model, which make every step together or not at all.

Each of them has a job of its own with the ranks of other replicas that have the same shard. Such a job may lose a
member in a step in which the others do not, or learn of it later. Inside the replica the framework's collectives wait
for all ranks. So a rank whose exchange has failed goes on with its attempt, which is void, and nobody waits for it in
vain. At the end of the attempt the ranks of the replica agree on whether all exchanges were made. Source: the two
phases of a commit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from poseidon.adapter.control import Control
from poseidon.errors import SURVIVABLE, Aborted, PoseidonError

_PAUSE_S = 0.1  # before they meet again, for those that are on their way
_VOID = "another rank of this replica cannot complete the step"


class OtherReplicas(Aborted):
    """Some shards have met replicas that others have not, which the next meeting is to mend."""


class Within(Protocol):
    """The membership of the job of one replica's ranks."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def control(self) -> Control | None: ...
    def abort(self, error: BaseException) -> None: ...


class ShardGroup:
    """This replica's ranks, of which the process is one. Used from the thread that trains.

    `failure` is why the attempt under way is void as far as this rank knows.
    """

    def __init__(self, within: Within) -> None:
        self._within = within
        self.on_void: Callable[[PoseidonError], None] | None = None  # is told when an attempt becomes void
        self.failure: PoseidonError | None = None
        self._own_error: BaseException | None = None  # which has ended the replica
        began_ms = time.time_ns() // 1_000_000 if within.rank == 0 else 0
        self._meeting = began_ms if within.control is None else within.control.sum([began_ms])[0]
        self._attempts = False  # an attempt is under way
        self._confirmed = False  # in this attempt

    @property
    def rank(self) -> int:
        """This rank's number in its replica: that of its shard."""
        return self._within.rank

    @property
    def size(self) -> int:
        """Number of the replica's ranks."""
        return self._within.world_size

    # Of one attempt.

    def begin(self) -> None:
        """An attempt begins. Failures of exchanges are noted from now on, and not raised."""
        self.failure, self._attempts, self._confirmed = None, True, False

    @property
    def is_void(self) -> bool:
        """Whether nothing of the attempt under way will count, so that nothing has to be exchanged any more."""
        return self.failure is not None

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Around what exchanges in an attempt: a failure that can be survived makes the attempt void."""
        try:
            yield
        except SURVIVABLE as error:
            if not self._attempts:
                raise
            self.note(error)

    def unless_void(self, call: Callable[..., None], *arguments: Any) -> None:
        """Makes a call that exchanges something, `deferring`, if the attempt under way may yet count."""
        if not self.is_void:
            with self.deferring():
                call(*arguments)

    def note(self, error: PoseidonError) -> None:
        """The attempt is void, because of this."""
        if self.failure is None:
            self.failure = error.with_traceback(None)
            if self.on_void is not None:
                self.on_void(self.failure)

    @property
    def awaits_confirmation(self) -> bool:
        """Whether the attempt's first update is still to come."""
        return self._attempts and not self._confirmed

    def confirm(self) -> None:
        """Before the first update of an attempt, with those of earlier ones made. Collective in the replica.

        Raises Aborted, or this rank's own failure, on all ranks of the replica if the attempt is void on one.
        """
        self._confirmed = True
        if (failure := self.agree(None)[0]) is not None:
            raise failure

    def end(
        self, failure: PoseidonError | None, wishes: Sequence[bool] = ()
    ) -> tuple[PoseidonError | None, list[bool]]:
        """An attempt ends, with this failure or without one: what the ranks of the replica `agree` on."""
        failure, self.failure, self._attempts = failure or self.failure, None, False
        return self.agree(failure, wishes)

    # What the ranks of the replica agree on. Each is collective in the replica.

    def agree(
        self, failure: PoseidonError | None, wishes: Sequence[bool] = ()
    ) -> tuple[PoseidonError | None, list[bool]]:
        """Why not all ranks can go on, None if they can; and for each wish whether some rank has it."""
        failure = failure or self.failure
        rows = self._gather([int(failure is not None), *map(int, wishes)])
        failed, *wished = [any(column) for column in zip(*rows, strict=True)]
        return failure or (Aborted(_VOID) if failed else None), wished

    def common_step(self, steps: Collection[int], latest: int) -> int:
        """The latest step among those, `latest` and the one before, whose beginning all ranks can put back; or -1."""
        rows = self._gather([int(latest in steps), int(latest - 1 in steps)])
        for step, column in zip((latest, latest - 1), zip(*rows, strict=True), strict=True):
            if all(column):
                return step
        return -1

    def next_meeting(self) -> int:
        """The number of the meeting with other replicas that begins: the same on all ranks of this replica.

        It is higher than that of any meeting before, those of processes that this replica has lost among them.
        """
        self._meeting += 1
        return self._meeting

    def compare(
        self, failure: PoseidonError | None, step: int, members: Sequence[tuple[int, int]]
    ) -> tuple[PoseidonError | None, frozenset[int]]:
        """What this rank has agreed on with other replicas, beside what the other ranks of its replica have.

        `members`: for each member its replica and the number of that one's meeting. `failure`: why this rank has not
        agreed on any. Returns why the replica cannot go on, None if it can, and the ranks that have to meet others once
        more: they have met a replica in an earlier meeting of that one's than another rank has. A replica that was
        lost may have met some before and be met by others since, or two replicas meet one late for ever.
        """
        failure, _ = self.agree(failure)
        if failure is not None:
            return failure, frozenset()
        shape = [step, *(replica for replica, _ in members)]
        counts = self._gather([len(shape)])
        if any(count != counts[0] for count in counts) or any(row != shape for row in self._gather(shape)):
            time.sleep(_PAUSE_S)
            return OtherReplicas("the ranks of this replica have met different ones"), frozenset()
        rows = self._gather([number for _, number in members])
        latest = [max(column) for column in zip(*rows, strict=True)]
        return None, frozenset(rank for rank, row in enumerate(rows) if row != latest)

    def abort(self, error: BaseException) -> None:
        """This rank fails by an error of its own, which ends its replica."""
        self._own_error = error
        self._within.abort(error)

    def _gather(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's values. A rank of the replica that is lost ends the others."""
        control = self._within.control
        if control is None:
            return [list(values)]
        try:
            return control.one_hot(values)
        except SURVIVABLE as error:
            if (own := self._own_error) is not None:
                raise PoseidonError(
                    "an error of this rank has ended its replica, of which all ranks have to be started again; cause: "
                    f"{type(own).__name__}: {own}"
                ) from None
            raise PoseidonError(
                f"a rank of this replica is lost, so that all of its ranks have to be started again; cause: {error}"
            ) from None
