"""An unhandled exception of this process becomes known to its launcher and to the other ranks of its jobs."""

from __future__ import annotations

import abc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any

from poseidon.errors import Aborted, PoseidonError
from poseidon.failure_marks import is_of_another, leave_mark
from poseidon.options import failure_mark


class FailureWatch(abc.ABC):
    """Whoever joins jobs in this process is one of these, and calls `watch` before."""

    def __init__(self) -> None:
        self._id = 0  # of the process that joined: a forked child inherits this, but not its threads
        self._watches = False
        # The numbers of threads that have ended are given to others.
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    @abc.abstractmethod
    def failures(self) -> Sequence[PoseidonError]:
        """What has ended jobs of this process."""

    @abc.abstractmethod
    def tell(self, error: BaseException) -> None:
        """Tells the other ranks of all jobs that this one fails with `error`."""

    @abc.abstractmethod
    def trains(self, thread: int) -> bool:
        """Whether this thread has exchanged something."""

    @abc.abstractmethod
    def end(self) -> None:
        """Leaves all jobs."""

    def watch(self) -> None:
        """Makes an unhandled exception tell the other ranks, and the end of the process say goodbye.

        Call it before joining, from the thread that joins: the others hear of an error in that by the store, the
        launcher does not.
        """
        self._id = os.getpid()
        self.note_thread()
        if self._watches:
            return
        self._watches = True
        # Unlike atexit, this also runs in children of `multiprocessing`.
        Finalize(None, self._leave_at_exit, exitpriority=100)
        sys.excepthook = self._aborting(sys.excepthook)
        inner = threading.excepthook

        def thread_hook(failure: threading.ExceptHookArgs) -> None:
            # Nobody waits for a thread that has never exchanged anything, such as one that uploads metrics.
            if failure.exc_value is not None and self._takes_part(failure.thread):
                self._abort(failure.exc_value)
            inner(failure)

        threading.excepthook = thread_hook

    def note_thread(self) -> None:
        """An unhandled exception of this thread fails the job."""
        self._threads.add(threading.current_thread())

    def note(self, error: BaseException) -> None:
        """Notes for the launcher that this process fails with `error`. Call it before any other process is told."""
        if not isinstance(error, SystemExit):
            leave_mark(error)

    def _takes_part(self, thread: threading.Thread | None) -> bool:
        if thread is None:
            return False
        return thread in self._threads or (thread.ident is not None and self.trains(thread.ident))

    def _leave_at_exit(self) -> None:
        for failure in self.failures():  # whoever has caught it may end with a status of its own
            leave_mark(failure)
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
        self.note(error)
        self.tell(error)


_ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]
