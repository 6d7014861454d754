"""The jobs of this process. They end with it, and learn of it when it fails."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

from poseidon.adapter.arrays import Arrays
from poseidon.adapter.control import Control
from poseidon.adapter.failure_watch import FailureWatch
from poseidon.adapter.features import Features
from poseidon.adapter.membership import Membership
from poseidon.adapter.shard_group import ShardGroup
from poseidon.errors import InvalidArgument, PoseidonError, ShutDown
from poseidon.failure_marks import note_end
from poseidon.options import World, between_replicas, resolve, within_replica


class Process(FailureWatch):
    """This process's job. A framework has one object of this class, or of a subclass that knows more jobs."""

    def __init__(self, arrays: Arrays, *features: str) -> None:
        super().__init__()
        self.own: Membership | None = None
        self.within: Membership | None = None  # with the option `replica`: of the job of this replica's ranks
        self._arrays, self._features = arrays, features  # the second: what the framework adds to every job's

    def init(self, place: World | None, options: Mapping[str, Any]) -> None:
        """The program's init(): `join`, once. Raises InvalidArgument if it has been called."""
        if self.own is not None:
            raise InvalidArgument("poseidon.init() was called twice: call shutdown() in between, or leave one out")
        self.join(place, options)

    def join(self, place: World | None, options: Mapping[str, Any]) -> None:
        """Makes this process part of its own job, with this place in it. If it is None, the options give the place."""
        self.watch()
        settings = resolve(place, **options)
        if not settings.replica:
            self.own = Membership(settings, self._arrays, *self._features)
            return
        between = between_replicas(settings)
        Features.of(between, *self._features)
        self.within = Membership(within_replica(settings), self._arrays, is_world=False)
        self.own = Membership(between, self._arrays, *self._features, shard_group=ShardGroup(self.within))

    def joined(self) -> Membership:
        """This process's own job. Raises ShutDown if it has not joined one, or has left it."""
        if self.own is None:
            raise ShutDown("this process belongs to no job: call poseidon.init() first")
        return self.own

    def collective_control(self, caller: str) -> Control | None:
        """The `Control` of the ranks, or None with one worker. Raises InvalidArgument if they have not met."""
        here = self.joined()
        here.check_met(caller)
        return here.control

    def barrier(self) -> None:
        """Returns once every rank has called it."""
        control = self.collective_control("barrier")
        if control is not None:
            control.barrier()

    def all(self) -> list[Membership]:
        """All jobs of this process, in the same order on all ranks."""
        return [one for one in (self.own, self.within) if one is not None]

    def finish(self) -> None:
        """Leaves all jobs because the program says that its work is done."""
        # Within `finally` it also says so after an error, and then a replacement is needed.
        if sys.exc_info()[1] is None and any(
            one.recovers and one.client is not None and one.client.failure is None for one in self.all()
        ):
            note_end()
        self.end()

    def end(self) -> None:
        """Leaves all jobs."""
        leaving = self.all()
        self.forget()
        for one in leaving:
            one.end()

    def forget(self) -> None:
        """This process belongs to no job any more."""
        self.own = self.within = None

    def failures(self) -> list[PoseidonError]:
        """What has ended jobs of this process."""
        return [one.client.failure for one in self.all() if one.client is not None and one.client.failure is not None]

    def tell(self, error: BaseException) -> None:
        """Tells the other ranks of all jobs that this one fails with `error`."""
        for one in self.all():
            # Where this fails it does so because of the same peers; the error itself is about to be shown.
            with contextlib.suppress(PoseidonError):
                one.abort(error)

    def trains(self, thread: int) -> bool:
        """Whether this thread has exchanged something."""
        return any(one.control is not None and thread in one.control.threads for one in self.all())
