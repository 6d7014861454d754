"""This process's place in its job, and in the jobs of process groups: init, rank, world size, barrier, shutdown."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch.distributed as dist

from poseidon import _core
from poseidon.adapter.control import Control
from poseidon.adapter.features import Features
from poseidon.adapter.membership import Membership
from poseidon.adapter.process import Process
from poseidon.errors import InvalidArgument
from poseidon.options import World, resolve
from poseidon.torch.process.process_groups import default_group, is_whole, part_of_job, program_timeout, world
from poseidon.torch.tensors.arrays import TENSORS


class _TorchProcess(Process):
    """The jobs of this process: its own, and those of the parts of torch.distributed's world that it is in."""

    def __init__(self) -> None:
        super().__init__(TENSORS)
        self._parts: dict[str, Membership] = {}  # by the name of their job
        self._joined_alone = False  # nobody called init() for `own`
        self._world: weakref.ref[Any] | None = None  # torch's group of all ranks as these have last seen it

    def join(self, place: World | None, options: Mapping[str, Any]) -> None:
        super().join(place, options)
        self._joined_alone = False
        self._note_world()

    def whole(self) -> Membership:
        """This process's own job, which it joins now if torch.distributed says where it belongs."""
        self._leave_former_world()
        if self.own is None and default_group() is not None:
            self.join(world(), _words_of_the_program(default_group()))
            self._joined_alone = True
        return self.joined()

    def part(self, group: dist.ProcessGroup) -> Membership:
        """The job of the ranks of `group`, which are not all. Collective among those at its first call."""
        self._leave_former_world()
        base = resolve(world(), **_words_of_the_program(group)) if self.own is None else self.own.settings
        Features.of(base, "part")
        job = part_of_job(base.job, group)
        if job not in self._parts:
            self.watch()
            self._parts[job] = Membership(
                base.replace(job=job, rank=dist.get_rank(group), world_size=dist.get_world_size(group)),
                self._arrays,
                is_world=False,
            )
            self._note_world()
        return self._parts[job]

    def all(self) -> list[Membership]:
        """In the same order on all ranks."""
        return [*(self._parts[job] for job in sorted(self._parts)), *super().all()]

    def forget(self) -> None:
        super().forget()
        self._parts, self._world = {}, None

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
        place, settings = world(), (self.within or self.own).settings
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


def _words_of_the_program(group: Any) -> dict[str, Any]:
    """Options that torch.distributed was given, where nobody has set Poseidon's own."""
    seconds = program_timeout(group)
    if seconds is None or resolve(world()).sources.get("timeout", "default") != "default":
        return {}
    return {"timeout": seconds}


_process = _TorchProcess()


def init(**options: Any) -> None:
    """Joins the job. Waits for all ranks, up to `timeout`.

    torch.distributed describes the job, if it is initialized; otherwise RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
    do (torchrun sets them), or the variables of mpirun or Slurm. `options` are those of `poseidon.options`, e.g.
    `timeout=60`. A keyword beats the environment. With one worker it connects to nothing. With on_failure=rejoin or
    shrink `Recovery` connects later. Raises a PoseidonError that names what is missing or who did not come. It may be
    called again then, and after `shutdown()`. dist.init_process_group() may come before or after it.
    """
    _process.init(world(), options)


def context() -> Membership:
    """The job of this process; ShutDown before `init()` and after `shutdown()`."""
    return _process.joined()


def memberships() -> list[Membership]:
    """All jobs of this process."""
    return _process.all()


def context_of(process_group: dist.ProcessGroup | None = None) -> Membership:
    """The job whose workers are the ranks of `process_group`; None, or a group of all ranks: this process's own.

    Where torch.distributed is initialized and init() was not called this joins that job, with the options of the
    environment. A part of the ranks has a job of its own, which the first call joins, collectively among them; it ends
    with shutdown(). Blocks up to `timeout`. What has become of a process group that was destroyed is not returned.
    Raises ShutDown where there is neither a job nor a process group, InvalidArgument for a group without this process.
    """
    if process_group is None or is_whole(process_group):
        return _process.whole()
    return _process.part(process_group)


def rank() -> int:
    """This worker's number, from 0 to world_size() - 1. With on_failure=shrink it may change between attempts."""
    return context().rank


def world_size() -> int:
    """Number of workers in the job. With on_failure=shrink it may change between attempts."""
    return context().world_size


def check_joins(here: Membership, what: str) -> None:
    """The ranks of `here` begin `what`, a feature that takes all of them, and is no step of a joined model.

    Raises InvalidArgument on all ranks if one has no data in a join(), and in the join() of another job at once: its
    ranks are others, and know nothing of this one.
    """
    if any(one.joined is not None for one in memberships() if one is not here):
        Features.refuse(what, "join")
    here.check_joins(what)


Call = TypeVar("Call", bound=Callable[..., Any])


def deferring(alone: Callable[..., Any]) -> Callable[[Call], Call]:
    """Decorates a call that takes all ranks. In a void attempt (`ShardGroup`) it is `alone` of the same arguments."""

    def decorate(function: Call) -> Call:
        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            shards = context().shard_group
            if shards is None:
                return function(*args, **named)
            if not shards.is_void:
                with shards.deferring():
                    return function(*args, **named)
            return alone(*args, **named)

        return cast(Call, call)

    return decorate


@deferring(lambda: None)
def barrier() -> None:
    """Returns once every rank has called it. Raises a PoseidonError if a rank fails or is too late."""
    check_joins(context(), "unjoined_call")
    _process.barrier()


def collective_control(caller: str) -> Control | None:
    """What the ranks exchange small things by; None with one worker. InvalidArgument where they have not met yet."""
    control = _process.collective_control(caller)
    check_joins(context(), "unjoined_call")
    return control


def straggler_report() -> list[_core.LateRank]:
    """With stragglers=drop, the ranks without which steps were completed, and how often. Leaves out ranks never late.

    The figures of this rank come from the answers that it got, those of others from the server in this process.
    """
    client = context().client
    return [] if client is None else client.straggler_report()


def scalars() -> dict[str, float]:
    """This worker's newest figures by name, for TensorBoard's `add_scalar` and the like (docs/watching.md).

    They are at most about two seconds or one step old. Empty before the first step, and with one worker.
    """
    meter = context().meter
    latest = None if meter is None else meter.latest
    return {} if latest is None else latest.scalars


def shutdown() -> None:
    """Leaves the job, and the jobs of process groups, when nothing is in flight any more.

    It does nothing if there is no job. It runs by itself when the process ends. With stragglers=drop and with
    consistency=ssp or async it waits for all ranks, because ranks that are behind need this one's server.
    """
    _process.finish()
