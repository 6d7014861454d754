"""The jobs of this process. They end with it, and learn of it when it fails."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any

from poseidon.adapter.arrays import Arrays
from poseidon.adapter.control import Control
from poseidon.adapter.membership import Membership
from poseidon.errors import Aborted, InvalidArgument, PoseidonError, ShutDown
from poseidon.failure_marks import is_of_another, leave_mark, note_end
from poseidon.options import World, failure_mark, resolve


class Process:
    """This process's job. A framework has one object of this class, or of a subclass that knows more jobs."""

    def __init__(self, arrays: Arrays, *features: str) -> None:
        self.own: Membership | None = None
        self._arrays, self._features = arrays, features  # the second: what the framework adds to every job's
        self._id = 0  # of the process that joined: a forked child inherits this, but not its threads
        self._watches = False
        self._joining: set[int] = set()  # threads that have joined a job

    def init(self, place: World | None, options: Mapping[str, Any]) -> None:
        """The program's init(): `join`, once. Raises InvalidArgument if it has been called."""
        if self.own is not None:
            raise InvalidArgument("poseidon.init() was called twice: call shutdown() in between, or leave one out")
        self.join(place, options)

    def join(self, place: World | None, options: Mapping[str, Any]) -> None:
        """Makes this process part of its own job, with this place in it. If it is None, the options give the place."""
        self._prepare()
        self.own = Membership(resolve(place, **options), self._arrays, *self._features)

    def joined(self) -> Membership:
        """This process's own job. Raises ShutDown if it has not joined one, or has left it."""
        if self.own is None:
            raise ShutDown("this process belongs to no job: call poseidon.init() first")
        return self.own

    def collective_control(self, caller: str) -> Control | None:
        """The `Control` of the ranks, or None with one worker. Raises InvalidArgument if they have not met."""
        here = self.joined()
        if here.recovers and here.control is None:
            raise InvalidArgument(
                f"{caller}() before poseidon.Recovery with on_failure={here.settings.on_failure}: a worker that "
                "replaces another runs this part alone, while the others train; call it in an attempt, or give the "
                "object to Recovery"
            )
        return here.control

    def barrier(self) -> None:
        """Returns once every rank has called it."""
        control = self.collective_control("barrier")
        if control is not None:
            control.barrier()

    def all(self) -> list[Membership]:
        """All jobs of this process, in the same order on all ranks."""
        return [] if self.own is None else [self.own]

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
        leaving, self.own = self.all(), None
        for one in leaving:
            one.end()

    def _prepare(self) -> None:
        self._id = os.getpid()
        self._joining.add(threading.get_ident())
        self._watch_for_failures()  # already while joining: the others hear of it by the store, the launcher does not

    def _watch_for_failures(self) -> None:
        """Makes an unhandled exception tell the other ranks, and the end of the process say goodbye."""
        if self._watches:
            return
        self._watches = True
        # Unlike atexit, this also runs in children of `multiprocessing`.
        Finalize(None, self._leave_at_exit, exitpriority=100)
        sys.excepthook = self._aborting(sys.excepthook)
        inner = threading.excepthook

        def thread_hook(failure: threading.ExceptHookArgs) -> None:
            # Nobody waits for a thread that has never exchanged anything, such as one that uploads metrics.
            if failure.exc_value is not None and self._trains(failure.thread):
                self._abort(failure.exc_value)
            inner(failure)

        threading.excepthook = thread_hook

    def _trains(self, thread: threading.Thread | None) -> bool:
        number = None if thread is None else thread.ident
        return number in self._joining or any(
            one.control is not None and number in one.control.threads for one in self.all()
        )

    def _leave_at_exit(self) -> None:
        for one in self.all():
            # Whoever has caught this may end with a status of its own.
            if one.client is not None and one.client.failure is not None:
                leave_mark(one.client.failure)
        self.end()

    def _aborting(self, inner: _ExceptHook) -> _ExceptHook:
        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self._abort(error)
            # Another program's hook may have more to do than to print.
            if inner is not sys.__excepthook__ or not self._is_told(error):
                inner(kind, error, trace)

        return hook

    def _is_told(self, error: BaseException) -> bool:
        """Whether one line is enough, because `poseidon run` shows the failure of the worker that failed first."""
        if failure_mark() is None or not is_of_another(error) or self._id != os.getpid():
            return False
        why = "" if isinstance(error, Aborted) else f": {error}"
        print(f"poseidon: this rank ends, because another has failed{why}", file=sys.stderr)
        return True

    def _abort(self, error: BaseException) -> None:
        # A data loader's worker has the hooks, too.
        if isinstance(error, SystemExit) or self._id != os.getpid():
            return
        leave_mark(error)
        for one in self.all():
            # Where this fails it does so because of the same peers; the error itself is about to be shown.
            with contextlib.suppress(PoseidonError):
                one.abort(error)


_ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]
