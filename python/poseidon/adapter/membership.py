"""A process's membership of one job."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from poseidon import _core
from poseidon.adapter.arrays import Arrays
from poseidon.adapter.control import Control
from poseidon.adapter.features import SAME_STEP, Features
from poseidon.adapter.join import JoinedTraining
from poseidon.adapter.meter import Meter
from poseidon.adapter.saved_steps import SavedSteps, Settles
from poseidon.adapter.shard_group import ShardGroup
from poseidon.adapter.store import agents_store, default_store, shared_store
from poseidon.chunk_cache import settle_chunk_bytes
from poseidon.errors import InvalidArgument, PoseidonError, PoseidonTimeout
from poseidon.failure_marks import note_membership
from poseidon.notices import tell_notices
from poseidon.options import Settings, hint_of_srun, refuse_without_srun

_SECONDS_BETWEEN_NOTICES = 5.0


class Watch(Protocol):
    """Looks at the job from a thread of its own (step_watch.py)."""

    def close(self) -> None:
        """Ends the thread."""


class Membership:
    """A process's membership of one job. `client` and `control` are None with one worker. `arrays`: the framework's.

    `features`: what the job has, beside what the options give. `recovers`: on_failure is rejoin or shrink. Then there
    is no client before `Recovery` calls `meet`, so that nobody waits for a worker that is still setting up.
    `shard_group`: with the option `replica`, the ranks of the same replica, which have other jobs of this kind.
    """

    def __init__(
        self,
        settings: Settings,
        arrays: Arrays,
        *features: str,
        is_world: bool = True,
        shard_group: ShardGroup | None = None,
    ) -> None:
        refuse_without_srun(settings.sources, os.environ)
        self.features = Features.of(settings, *features)
        self.settings = settings
        self.shard_group = shard_group
        self.in_attempt = False  # of `Recovery`: what changes now is undone if the attempt fails
        self.is_world = is_world  # whether this is the process's own job, not one of a part of its ranks
        self.client: _core.Client | None = None
        self.control: Control | None = None
        self.meter: Meter | None = None  # of the present membership
        self.watch: Watch | None = None
        self.is_recorded = False  # some model's steps are (run_record.py)
        self.joined: JoinedTraining | None = None  # that of the first model whose join() is under way
        self.in_flight: weakref.WeakSet[Settles] = weakref.WeakSet()  # of every model that is trained in the job
        self.servers_save = bool(settings.checkpoint_dir)  # what they keep; of dedicated ones it is known once all met
        self.saved: SavedSteps | None = None  # with checkpoint_dir, but where Recovery keeps steps together
        self.meets_in = "Recovery"  # where the workers meet with `recovers`, as programs call it
        self.recovery_count = 0  # of the objects of this kind so far
        self.recovered_exchange: object | None = None  # the one whose steps a recovery makes again, if it is one alone
        self.own_failure: BaseException | None = None  # found here by compiled code, which tells it as one of the job
        self.before_leave: Callable[[], None] | None = None  # a framework lets go of the present client
        self.value_layers: dict[str, int] = {}  # of the present client (value_layers.py)
        self._arrays = arrays
        self.recovers = settings.world_size > 1 and settings.on_failure != "abort"
        self._store: Any = None  # with `recovers` one for all generations
        self._serves_store = False  # rank 0 did, on MASTER_PORT, until all had met
        self._generation = 0
        self._refused = ""
        self._chunk_bytes = 0
        self._next_notices = 0.0  # when to look for more, by the monotonic clock
        if self.recovers:
            self._refuse_group_of_torch()
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

    @property
    def data_part(self) -> tuple[int, int]:
        """This process's number among all that train, and how many these are; of replicas, all of their ranks."""
        shards = self.shard_group
        if shards is None:
            return self.rank, self.world_size
        return self.rank * shards.size + shards.rank, self.world_size * shards.size

    @property
    def present_client(self) -> _core.Client:
        """The client, where there is one: with several workers, after `meet`."""
        assert self.client is not None
        return self.client

    @property
    def present_control(self) -> Control:
        """The control, where there is one: with several workers, after `prepare`."""
        assert self.control is not None
        return self.control

    def check_joins(self, what: str) -> None:
        """This rank begins what takes all ranks: a feature, beside the steps of a joined model.

        Raises InvalidArgument on all ranks if one has no data in a join().
        """
        if self.joined is not None:
            self.joined.notify_other(what)

    def check_met(self, caller: str) -> None:
        """Raises InvalidArgument if `caller`, which takes all ranks, comes before `Recovery`, in which they meet."""
        if self.recovers and self.client is None:
            raise InvalidArgument(
                f"{caller}() before poseidon.{self.meets_in} with on_failure={self.settings.on_failure}: a worker that "
                "replaces another runs this part alone, while the others train; call it in an attempt, or give the "
                f"object to {self.meets_in}"
            )

    def meet(self) -> None:
        """Joins the job, or its next generation if this process is part of it. Blocks, up to the timeout."""
        self.leave()
        options = self.settings.core()
        options.generation = self._generation
        if not self.recovers:
            # torch's store is that of one replica.
            store = shared_store(self.settings) if self.shard_group is None else None
            self._serves_store = store is None
            try:
                self.client = _core.Client.connect(options, store)
            except PoseidonTimeout as error:
                if hint := hint_of_srun(self.settings.sources, os.environ):
                    raise PoseidonTimeout(f"{error}; {hint}") from None
                raise
            return
        self._refuse_group_of_torch()
        if self._store is None:
            self._store = agents_store(self.settings) or _core.open_store(options)
        self.client = _core.Client.connect(options, self._store)
        self._generation = self.client.generation
        note_membership()

    def prepare(self) -> None:
        """Agrees on what all exchanges need. Collective; call it after `meet`."""
        assert self.client is not None
        self.features.remove("sums_of_machines")
        if self.client.cluster.hosts:
            self.features.add("sums_of_machines")
        self._chunk_bytes = settle_chunk_bytes(self.client, self.settings, self._chunk_bytes)
        tell_notices(self.client)
        self.control = Control(self.client, self._arrays)
        self.meter = Meter(self.settings.job, self.client)
        self.servers_save = self._ask_whether_servers_save(self.client, self.control)
        if self.servers_save and not self.recovers:
            together, asked = self.features.keeps(SAME_STEP), bool(self.settings.checkpoint_dir)
            self.saved = SavedSteps(self.client, self.in_flight, together, asked)
        if self._serves_store:
            # Rank 0 has closed its store before this: whoever goes on to dist.init_process_group() finds torch's.
            self.control.barrier()

    def _ask_whether_servers_save(self, client: _core.Client, control: Control) -> bool:
        """Collective with dedicated servers, which have options of their own. A rank may know only some of them."""
        if not self.settings.servers:
            return bool(self.settings.checkpoint_dir)
        return control.sum([bool(self.settings.checkpoint_dir) or client.servers_save])[0] > 0

    def tell_notices(self) -> None:
        """Warns of new notices of the client. It looks for them only every few seconds."""
        if self.client is not None and time.monotonic() >= self._next_notices:
            self._next_notices = time.monotonic() + _SECONDS_BETWEEN_NOTICES
            tell_notices(self.client)

    def leave(self) -> None:
        """Ends the present client, if there is one. Afterwards no operation of it is under way."""
        self._close_watchers()
        if self.client is not None:
            self._let_go()
            self.client.shutdown()
        self.client = self.control = None
        self.value_layers = {}

    def end(self) -> None:
        """Leaves for good, when nothing is in flight. Frees the port of a store that this process served."""
        if self.client is not None:
            for one in list(self.in_flight):
                # After a failure the parameters that miss an update say so to whoever uses them.
                with contextlib.suppress(PoseidonError):
                    one.settle()
            if self.control is not None and not self.features.keeps(SAME_STEP):
                # Whoever is behind still needs the server of this process.
                with contextlib.suppress(PoseidonError):
                    self.control.barrier()
            self._let_go()
            self.client.shutdown(serves_on=True)  # another rank may still save what this one's server keeps
        self._close_watchers()
        self._store = None

    def _let_go(self) -> None:
        if self.before_leave is not None:
            self.before_leave()

    def _close_watchers(self) -> None:
        watch, self.watch = self.watch, None
        if watch is not None:
            watch.close()
        if self.meter is not None:
            self.meter.close()

    def someone_joins(self) -> bool:
        """Whether a worker waits for the next generation of the job. It asks the store and does not wait."""
        # A lower one: the store was lost with rank 0, and others have begun again without this process.
        return _core.generation_wanted(self._store, self.settings.job) not in (0, self._generation)

    def note_leaving(self) -> None:
        """Tells the others that this process leaves for good, so that they do not wait for it when they meet again."""
        if self._store is not None:
            _core.note_left(self._store, self.settings.job, self._generation, self.settings.rank)

    def newly_refused(self) -> str:
        """The process of another job or run that was refused since the last call, and why; empty if there is none."""
        before, self._refused = self._refused, _core.last_refused(self._store, self.settings.job)
        return self._refused if self._refused != before else ""

    def abort(self, error: BaseException) -> None:
        """Tells the other ranks that this one fails with `error`."""
        if self.client is not None:
            text = "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
            self.client.abort(f"rank {self.rank} failed: {text}")

    def end_generation(self, why: str) -> None:
        """Ends the present membership on all ranks, although nothing has failed. They meet again in the next one."""
        if self.client is not None:
            self.client.abort(why, planned=True)

    def _refuse_group_of_torch(self) -> None:
        if default_store() is not None and not self.settings.use_agent_store and self.shard_group is None:
            self.features.check("torch_group")
