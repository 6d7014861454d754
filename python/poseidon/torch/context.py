"""This process's place in the job: init, rank, world size, barrier, broadcast and shutdown."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from multiprocessing.util import Finalize
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from poseidon.chunk_cache import settle_chunk_bytes
from poseidon.errors import InvalidArgument, PoseidonError, ShutDown
from poseidon.notices import tell_notices
from poseidon.options import Settings, resolve

if TYPE_CHECKING:
    from poseidon import _core
    from poseidon.torch.control import Control
    from poseidon.torch.synchronizer import Synchronizer


class Context:
    """A process's membership of one job. `client` and `control` are None with one worker."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.process_id = os.getpid()
        self.client: _core.Client | None = None
        self.control: Control | None = None
        self.synchronizers: weakref.WeakSet[Synchronizer] = weakref.WeakSet()
        if settings.world_size == 1:
            return
        from poseidon import _core
        from poseidon.torch.control import Control
        from poseidon.torch.store import AgentStore

        store = AgentStore(settings) if settings.use_agent_store else None
        self.client = _core.Client.connect(settings.core(), store)
        settle_chunk_bytes(self.client, settings)
        tell_notices(self.client)
        self.control = Control(self.client)

    def abort(self, error: BaseException) -> None:
        """Tells the other ranks that this one fails with `error`."""
        if self.client is not None:
            text = "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
            self.client.abort(f"rank {self.settings.rank} failed: {text}")


_context: Context | None = None


def init(**options: Any) -> None:
    """Joins the job that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe (torchrun sets them).

    `options` are those of `poseidon.options`, e.g. `timeout=60`; a keyword beats the environment.
    Waits for all ranks, up to `timeout`. With one worker it connects to nothing. Raises a
    PoseidonError that names what is missing or who did not come.
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
    """This worker's number, from 0 to world_size() - 1."""
    return context().settings.rank


def world_size() -> int:
    """Number of workers in the job."""
    return context().settings.world_size


def barrier() -> None:
    """Returns once every rank has called it; an error of a rank that fails or is too late."""
    control = context().control
    if control is not None:
        control.barrier()


def broadcast(tensors: torch.Tensor | Iterable[torch.Tensor], root: int = 0) -> None:
    """Overwrites `tensors` on every rank with those of rank `root`.

    Every rank passes equally many of the same shapes and dtypes, in the same order; any dtype,
    device and memory format. Raises InvalidArgument for a root that is no rank.
    """
    here = context()
    if not 0 <= root < here.settings.world_size:
        raise InvalidArgument(f"root is {root}: it must be a rank, from 0 to {here.settings.world_size - 1}")
    if here.control is not None:
        here.control.broadcast([tensors] if isinstance(tensors, torch.Tensor) else list(tensors), root)


def shutdown() -> None:
    """Leaves the job, after what is in flight. Does nothing if there is none; runs by itself when the process ends."""
    global _context
    leaving, _context = _context, None
    if leaving is None or leaving.client is None:
        return
    for sync in list(leaving.synchronizers):
        # After a failure the parameters that miss an update say so to whoever uses them.
        with contextlib.suppress(PoseidonError):
            sync.settle()
    leaving.client.shutdown()


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
