"""What torch.distributed says about this process: its world, its store and its process groups."""

from __future__ import annotations

import contextlib
import hashlib
import re
from typing import Any

import torch.distributed as dist

from poseidon.adapter.store import default_store
from poseidon.errors import InvalidArgument
from poseidon.options import World

_LONGEST_JOB = 64
_ANY_ADDRESS = ("", "0.0.0.0", "::")


def default_group() -> dist.ProcessGroup | None:
    """The group of all ranks; None where torch.distributed is not initialized."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    return dist.distributed_c10d._get_default_group()


def world() -> World | None:
    """This process's place among all ranks of torch.distributed; None where that is not initialized."""
    store: Any = default_store()
    return None if store is None else place_in(store, dist.get_rank(), dist.get_world_size())


def place_in(store: Any, rank: int, world_size: int) -> World:
    """This process's place among ranks that have met in this store of torch.distributed."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore) and store.host not in _ANY_ADDRESS:
        return World(rank, world_size, store.host, store.port)
    return World(rank, world_size)


def program_timeout(group: Any) -> float | None:
    """The seconds that the program gave `init_process_group` or `new_group`; None where it left torch's default."""
    default_of = getattr(dist.distributed_c10d, "_get_default_timeout", None)
    for backend in _backends(group):
        given = getattr(getattr(backend, "options", None), "_timeout", None)
        name = str(getattr(backend, "name", lambda: "gloo")())
        if given is not None and default_of is not None and given != default_of(name):
            return float(given.total_seconds())
    return None


def _backends(group: Any) -> list[Any]:
    found = []
    for device in getattr(group, "_device_types", ()):
        with contextlib.suppress(RuntimeError):  # a backend that is made at its first use
            found.append(group._get_backend(device))
    return found


def is_whole(group: dist.ProcessGroup) -> bool:
    """Whether `group` has all ranks of torch.distributed. InvalidArgument for one that this process is not in."""
    if default_group() is None:
        raise InvalidArgument("process_group was given without torch.distributed: call dist.init_process_group() first")
    if group is dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(group) < 0:
        raise InvalidArgument(
            f"process_group does not have this process, rank {dist.get_rank()}: wrap the module on its ranks only"
        )
    return dist.get_process_group_ranks(group) == list(range(dist.get_world_size()))


def ranks_of(group: Any) -> list[int]:
    """The ranks of a process group; None is that of all. None where torch.distributed does not run."""
    group = default_group() if group is None else group
    return [] if group is None else list(dist.get_process_group_ranks(group))


def has_same_ranks(one: Any, other: Any) -> bool:
    """Whether two process groups have the same ranks. None is the group of all where torch.distributed does not run."""
    if one is None or other is None:
        return one is other
    return dist.get_process_group_ranks(one) == dist.get_process_group_ranks(other)


def part_of_job(job: str, group: dist.ProcessGroup) -> str:
    """The name of the job of `group`'s ranks, the same on each of them and another one for each group."""
    ranks = "-".join(map(str, dist.get_process_group_ranks(group)))
    name = f"{job}.{group.group_name}.{ranks}"
    if len(name) <= _LONGEST_JOB and re.fullmatch(r"[\w.-]+", name):
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:24]
    return f"{job[: _LONGEST_JOB - len(digest) - 1]}.{digest}"
