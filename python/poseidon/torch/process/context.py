"""This process's place in the job: init, rank, world size, barrier, broadcast and shutdown; and in those of groups."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from multiprocessing.util import Finalize
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from poseidon.chunk_cache import settle_chunk_bytes
from poseidon.errors import InvalidArgument, PoseidonError, ShutDown
from poseidon.failure_marks import leave_mark
from poseidon.notices import tell_notices
from poseidon.options import Settings, resolve
from poseidon.torch.adapter.drift import check_options, ranks_drift
from poseidon.torch.process.process_groups import default_group, is_whole, part_of_job, world

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from poseidon import _core
    from poseidon._core import LateRank
    from poseidon.torch.adapter.control import Control
    from poseidon.torch.exchange.synchronizer import Synchronizer


_SECONDS_BETWEEN_NOTICES = 5.0


class Context:
    """A process's membership of one job. `client` and `control` are None with one worker.

    `recovers`: on_failure is rejoin or shrink. Then there is no client before `Recovery` calls `meet`, so that
    nobody waits for a worker that is still setting up.
    """

    def __init__(self, settings: Settings, is_world: bool = True) -> None:
        check_options(settings)
        self.settings = settings
        self.is_world = is_world  # whether this is the process's own job, not one of a part of its ranks
        self.client: _core.Client | None = None
        self.control: Control | None = None
        self.synchronizers: weakref.WeakSet[Synchronizer] = weakref.WeakSet()
        self.recovers = settings.world_size > 1 and settings.on_failure != "abort"
        self._store: Any = None  # with `recovers` one for all generations
        self._serves_store = False  # rank 0 did, on MASTER_PORT, until all had met
        self._generation = 0
        self._chunk_bytes = 0
        self._notices_told = 0
        self._next_notices = 0.0  # when to look for more, by the monotonic clock
        if self.recovers:
            _refuse_recovery_with_torch(settings)
        elif settings.world_size > 1:
            try:
                self.meet()
                self.prepare()
            except BaseException:
                self.leave()
                raise

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
        from poseidon.torch.adapter.store import agents_store, shared_store

        self.leave()
        options = self.settings.core()
        options.generation = self._generation
        if not self.recovers:
            store = shared_store(self.settings)
            self._serves_store = store is None
            self.client = _core.Client.connect(options, store)
            return
        _refuse_recovery_with_torch(self.settings)
        if self._store is None:
            self._store = agents_store(self.settings) or _core.open_store(options)
        self.client = _core.Client.connect(options, self._store)
        self._generation = self.client.generation

    def prepare(self) -> None:
        """Collective, after `meet`: agrees on what all exchanges need."""
        from poseidon.torch.adapter.control import Control

        assert self.client is not None
        self._chunk_bytes = settle_chunk_bytes(self.client, self.settings, self._chunk_bytes)
        self._notices_told = tell_notices(self.client)
        self.control = Control(self.client)
        if self._serves_store:
            # Rank 0 has closed its store before this: whoever goes on to dist.init_process_group() finds torch's.
            self.control.barrier()

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


def _refuse_recovery_with_torch(settings: Settings) -> None:
    if default_group() is not None and not settings.use_agent_store:
        raise InvalidArgument(
            f"on_failure={settings.on_failure} while torch.distributed is initialized: torch cannot replace a worker "
            "that is lost, so leave out dist.init_process_group(), or use on_failure=abort"
        )


class _Memberships:
    """The jobs of this process: its own, and those of the parts of torch.distributed's world that it is in."""

    def __init__(self) -> None:
        self.own: Context | None = None
        self.process_id = 0  # that joined them: a forked child inherits this, but not their threads
        self._parts: dict[str, Context] = {}  # by the name of their job
        self._joined_alone = False  # nobody called init() for `own`
        self._world: weakref.ref[Any] | None = None  # torch's group of all ranks as these have last seen it

    def join(self, options: Mapping[str, Any], alone: bool = False) -> None:
        """Makes this process part of its own job."""
        self._prepare()
        self.own = Context(resolve(world(), **options))
        self._joined_alone = alone
        self._note_world()

    def whole(self) -> Context:
        """This process's own job, which it joins now if torch.distributed says where it belongs."""
        self._leave_former_world()
        if self.own is None and default_group() is not None:
            self.join({}, alone=True)
        if self.own is None:
            raise ShutDown("this process belongs to no job: call poseidon.init() first")
        return self.own

    def part(self, group: ProcessGroup) -> Context:
        """The job of the ranks of `group`, which are not all. Collective among those at its first call."""
        self._leave_former_world()
        base = resolve(world()) if self.own is None else self.own.settings
        if base.on_failure != "abort":
            raise InvalidArgument(
                f"process_group has not all ranks, and on_failure is {base.on_failure}: workers are replaced in jobs "
                "of all ranks only, so use on_failure=abort, or leave process_group out"
            )
        job = part_of_job(base.job, group)
        if job not in self._parts:
            self._prepare()
            self._parts[job] = Context(
                dataclasses.replace(base, job=job, rank=dist.get_rank(group), world_size=dist.get_world_size(group)),
                is_world=False,
            )
            self._note_world()
        return self._parts[job]

    def all(self) -> list[Context]:
        """In the same order on all ranks."""
        parts = [self._parts[job] for job in sorted(self._parts)]
        return parts if self.own is None else [*parts, self.own]

    def end(self) -> None:
        """Leaves all jobs."""
        leaving, self.own, self._parts, self._world = self.all(), None, {}, None
        for one in leaving:
            one.end()

    def _prepare(self) -> None:
        self.process_id = os.getpid()
        _watch_for_failures()  # already while joining: the others hear of it by the store, the launcher does not

    def _note_world(self) -> None:
        group = default_group()
        self._world = None if group is None else weakref.ref(group)

    def _leave_former_world(self) -> None:
        """Jobs that torch.distributed has formed end with it; one of init() must be what torch.distributed says now."""
        group, former = default_group(), self._world and self._world()
        if group is former and (group is not None or self._world is None):
            return
        if self.own is None or self._joined_alone:
            self.end()
            return
        place, settings = world(), self.own.settings
        if place is not None and (place.rank, place.world_size) != (settings.rank, settings.world_size):
            raise InvalidArgument(
                f"torch.distributed is initialized as rank {place.rank} of {place.world_size}, while poseidon.init() "
                f"was called as rank {settings.rank} of {settings.world_size}: call poseidon.shutdown() before the "
                "process group changes, and poseidon.init() after it"
            )
        for part in self._parts.values():
            part.end()
        self._parts = {}
        self._note_world()


_memberships = _Memberships()


def init(**options: Any) -> None:
    """Joins the job that torch.distributed, or RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (torchrun sets them), or
    Slurm's variables describe.

    `options` are those of `poseidon.options`, e.g. `timeout=60`; a keyword beats the environment.
    Waits for all ranks, up to `timeout`. With one worker it connects to nothing, with on_failure=rejoin or shrink
    `Recovery` does so later. Raises a PoseidonError that names what is missing or who did not come; then, and after
    `shutdown()`, it may be called again. dist.init_process_group() may come before or after it.
    """
    if _memberships.own is not None:
        raise InvalidArgument("poseidon.init() was called twice: call shutdown() in between, or leave one out")
    _memberships.join(options)


def context() -> Context:
    """The job of this process; ShutDown before `init()` and after `shutdown()`."""
    if _memberships.own is None:
        raise ShutDown("this process belongs to no job: call poseidon.init() first")
    return _memberships.own


def synchronizers() -> list[Synchronizer]:
    """Of all models that are trained in this process's jobs."""
    return [sync for one in _memberships.all() for sync in one.synchronizers]


def context_of(process_group: ProcessGroup | None = None) -> Context:
    """The job whose workers are the ranks of `process_group`; None, or a group of all ranks: this process's own.

    Where torch.distributed is initialized and init() was not called this joins that job, with the options of the
    environment. A part of the ranks has a job of its own, which the first call joins, collectively among them; it ends
    with shutdown(). Blocks up to `timeout`. What has become of a process group that was destroyed is not returned.
    Raises ShutDown where there is neither a job nor a process group, InvalidArgument for a group without this process.
    """
    if process_group is None or is_whole(process_group):
        return _memberships.whole()
    return _memberships.part(process_group)


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
    """Leaves the job, and those of process groups, after what is in flight. Does nothing if there is none; runs by
    itself when the process ends.

    With stragglers=drop and consistency=ssp or async it waits for all ranks: those behind need this one's server.
    """
    _memberships.end()


_watching = False


def _watch_for_failures() -> None:
    """Makes an unhandled exception tell the other ranks, and the end of the process say goodbye."""
    global _watching
    if _watching:
        return
    _watching = True
    # Unlike atexit, this also runs in children of `multiprocessing`.
    Finalize(None, _leave_at_exit, exitpriority=100)
    sys.excepthook = _aborting(sys.excepthook)
    inner = threading.excepthook

    def thread_hook(failure: threading.ExceptHookArgs) -> None:
        if failure.exc_value is not None:
            _abort(failure.exc_value)
        inner(failure)

    threading.excepthook = thread_hook


def _leave_at_exit() -> None:
    for one in _memberships.all():
        # Whoever has caught this may end with a status of its own.
        if one.client is not None and one.client.failure is not None:
            leave_mark(one.client.failure)
    shutdown()


_ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def _aborting(inner: _ExceptHook) -> _ExceptHook:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _abort(error)
        inner(kind, error, trace)

    return hook


def _abort(error: BaseException) -> None:
    # A data loader's worker has the hooks, too.
    if isinstance(error, SystemExit) or _memberships.process_id != os.getpid():
        return
    leave_mark(error)
    for one in _memberships.all():
        # Where this fails it does so because of the same peers; the error itself is about to be shown.
        with contextlib.suppress(PoseidonError):
            one.abort(error)
