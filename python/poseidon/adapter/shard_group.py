"""The ranks of one replica of a sharded model, which make every step together or not at all.

Each of them has a job of its own with the ranks of other replicas that have the same shard. Such a job may lose a
member in a step in which the others do not, or learn of it later. Inside the replica the framework's collectives wait
for all ranks. So a rank whose exchange has failed goes on with its attempt, which is void, and nobody waits for it in
vain. At the end of the attempt the ranks of the replica agree on whether all exchanges were made. Source: the two
phases of a commit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from poseidon.adapter.control import Control
from poseidon.errors import SURVIVABLE, Aborted, PoseidonError

_VOID = "another rank of this replica cannot complete the step"


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
        self.failure: PoseidonError | None = None
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

    def note(self, error: PoseidonError) -> None:
        """The attempt is void, because of this."""
        if self.failure is None:
            self.failure = error.with_traceback(None)

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

    def check_agreed(self, failure: PoseidonError | None, numbers: Sequence[int]) -> PoseidonError | None:
        """Why not all ranks have agreed with other replicas on the same numbers, of members and steps; None: they have.

        `failure`: why this rank has not agreed on any.
        """
        failure, _ = self.agree(failure)
        if failure is not None:
            return failure
        width = max(row[0] for row in self._gather([len(numbers)]))
        rows = self._gather([len(numbers), *numbers, *[-1] * (width - len(numbers))])
        return (
            None if all(row == rows[0] for row in rows) else Aborted("the ranks of this replica met different others")
        )

    def abort(self, error: BaseException) -> None:
        """This rank fails by an error of its own, which ends its replica."""
        self._within.abort(error)

    def _gather(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's values. A rank of the replica that is lost ends the others."""
        control = self._within.control
        if control is None:
            return [list(values)]
        try:
            return control.one_hot(values)
        except SURVIVABLE as error:
            raise PoseidonError(
                f"a rank of this replica is lost, so that all of its ranks have to be started again; cause: {error}"
            ) from None
