"""This process's place in the job: init, rank, world size, barrier and shutdown."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing.util import Finalize
from types import TracebackType
from typing import TYPE_CHECKING, Any

from poseidon.chunk_cache import settle_chunk_bytes
from poseidon.errors import InvalidArgument, PoseidonError, ShutDown
from poseidon.notices import tell_notices
from poseidon.options import Settings, resolve
from poseidon.torch.drift import check_options, ranks_drift

if TYPE_CHECKING:
    from poseidon import _core
    from poseidon._core import LateRank
    from poseidon.torch.control import Control
    from poseidon.torch.synchronizer import Synchronizer


_SECONDS_BETWEEN_NOTICES = 5.0


class Context:
    """A process's membership of one job. `client` and `control` are None with one worker.

    `recovers`: on_failure is rejoin or shrink. Then there is no client before `Recovery` calls `meet`, so that
    nobody waits for a worker that is still setting up.
    """

    def __init__(self, settings: Settings) -> None:
        check_options(settings)
        self.settings = settings
        self.process_id = os.getpid()
        self.client: _core.Client | None = None
        self.control: Control | None = None
        self.synchronizers: weakref.WeakSet[Synchronizer] = weakref.WeakSet()
        self.recovers = settings.world_size > 1 and settings.on_failure != "abort"
        self._store: Any = None  # one for all generations; None: the client opens its own
        self._generation = 0
        self._chunk_bytes = 0
        self._notices_told = 0
        self._next_notices = 0.0  # when to look for more, by the monotonic clock
        if settings.world_size > 1 and not self.recovers:
            self.meet()
            self.prepare()

    @property
    def rank(self) -> int:
        """This worker's number in the present membership."""
        return self.settings.rank if self.client is None else self.client.rank

    @property
    def world_size(self) -> int:
        """Number of workers in the present membership."""
        return self.settings.world_size if self.client is None else self.client.world_size

    def meet(self) -> None:
        """Joins the job, or the next generation of one that this process is part of. Blocks, up to the timeout."""
        from poseidon import _core
        from poseidon.torch.store import AgentStore

        self.leave()
        options = self.settings.core()
        options.generation = self._generation
        if self._store is None and self.settings.use_agent_store:
            self._store = AgentStore(self.settings)
        elif self._store is None and self.recovers:
            self._store = _core.open_store(options)
        self.client = _core.Client.connect(options, self._store)
        self._generation = self.client.generation

    def prepare(self) -> None:
        """Collective, after `meet`: agrees on what all exchanges need."""
        from poseidon.torch.control import Control

        assert self.client is not None
        self._chunk_bytes = settle_chunk_bytes(self.client, self.settings, self._chunk_bytes)
        self._notices_told = tell_notices(self.client)
        self.control = Control(self.client)

    def tell_notices(self) -> None:
        """Warns of what the job has gone on without since the last call; looks only now and then."""
        if self.client is not None and time.monotonic() >= self._next_notices:
            self._next_notices = time.monotonic() + _SECONDS_BETWEEN_NOTICES
            self._notices_told = tell_notices(self.client, self._notices_told)

    def leave(self) -> None:
        """Ends the present client, if there is one: nothing of it is under way afterwards."""
        if self.client is not None:
            self.client.shutdown()
        self.client = self.control = None

    def end(self) -> None:
        """Leaves for good, after what is in flight; the port of a store that this process served is free afterwards."""
        if self.client is not None:
            for sync in list(self.synchronizers):
                # After a failure the parameters that miss an update say so to whoever uses them.
                with contextlib.suppress(PoseidonError):
                    sync.settle()
            if self.control is not None and ranks_drift(self.settings):
                # Whoever is behind still needs the server of this process.
                with contextlib.suppress(PoseidonError):
                    self.control.barrier()
            self.client.shutdown()
        self._store = None

    def someone_joins(self) -> bool:
        """Whether a worker waits for the next generation of the job. A quick look at the store."""
        from poseidon import _core

        # A lower one: the store was lost with rank 0, and others have begun again without this process.
        return _core.generation_wanted(self._store, self.settings.job) not in (0, self._generation)

    def abort(self, error: BaseException) -> None:
        """Tells the other ranks that this one fails with `error`."""
        if self.client is not None:
            text = "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
            self.client.abort(f"rank {self.rank} failed: {text}")

    def end_generation(self, why: str) -> None:
        """Ends the present membership on all ranks, although nothing has failed: they meet again under the next."""
        if self.client is not None:
            self.client.abort(why, planned=True)


_context: Context | None = None


def init(**options: Any) -> None:
    """Joins the job that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe (torchrun sets them).

    `options` are those of `poseidon.options`, e.g. `timeout=60`; a keyword beats the environment.
    Waits for all ranks, up to `timeout`. With one worker it connects to nothing, with on_failure=rejoin or shrink
    `Recovery` does so later. Raises a PoseidonError that names what is missing or who did not come.
    """
    global _context
    if _context is not None:
        raise InvalidArgument("poseidon.init() was called twice: call shutdown() in between, or leave one out")
    _context = Context(resolve(**options))
    _watch_for_failures()


def context() -> Context:
    """The job of this process; ShutDown before `init()` and after `shutdown()`."""
    if _context is None:
        raise ShutDown("this process belongs to no job: call poseidon.init() first")
    return _context


def rank() -> int:
    """This worker's number, from 0 to world_size() - 1. With on_failure=shrink it may change between attempts."""
    return context().rank


def world_size() -> int:
    """Number of workers in the job. With on_failure=shrink it may change between attempts."""
    return context().world_size


def barrier() -> None:
    """Returns once every rank has called it; an error of a rank that fails or is too late."""
    control = collective_control("barrier")
    if control is not None:
        control.barrier()


def collective_control(caller: str) -> Control | None:
    """What the ranks exchange small things by; None with one worker. InvalidArgument where they have not met yet."""
    here = context()
    if here.recovers and here.control is None:
        raise InvalidArgument(
            f"{caller}() before poseidon.Recovery with on_failure={here.settings.on_failure}: a worker that replaces "
            "another sets up alone, while the others train; do it in an attempt, or give the object to Recovery"
        )
    return here.control


def straggler_report() -> list[LateRank]:
    """With stragglers=drop: the ranks that steps have been completed without, and how often; those never late left out.

    This rank, from the answers that it got, and the others as the server of this process has seen them.
    """
    client = context().client
    return [] if client is None else client.straggler_report()


def shutdown() -> None:
    """Leaves the job, after what is in flight. Does nothing if there is none; runs by itself when the process ends.

    With stragglers=drop and consistency=ssp or async it waits for all ranks: those behind need this one's server.
    """
    global _context
    leaving, _context = _context, None
    if leaving is not None:
        leaving.end()


_watching = False


def _watch_for_failures() -> None:
    """Makes an unhandled exception tell the other ranks, and the end of the process say goodbye."""
    global _watching
    if _watching:
        return
    _watching = True
    # Unlike atexit, this also runs in children of `multiprocessing`.
    Finalize(None, shutdown, exitpriority=100)
    sys.excepthook = _aborting(sys.excepthook)
    inner = threading.excepthook

    def thread_hook(failure: threading.ExceptHookArgs) -> None:
        if failure.exc_value is not None:
            _abort(failure.exc_value)
        inner(failure)

    threading.excepthook = thread_hook


_ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def _aborting(inner: _ExceptHook) -> _ExceptHook:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _abort(error)
        inner(kind, error, trace)

    return hook


def _abort(error: BaseException) -> None:
    # A forked child (a data loader's worker) has the parent's context, but not its threads.
    if _context is not None and _context.process_id == os.getpid() and not isinstance(error, SystemExit):
        # Where this fails it does so because of the same peers; the error itself is about to be shown.
        with contextlib.suppress(PoseidonError):
            _context.abort(error)
