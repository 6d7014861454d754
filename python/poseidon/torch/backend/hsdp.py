"""The replicas of torch's own sharded models (HSDP) exchange by the backend."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from poseidon.torch.backend.group import NAME, ProcessGroup


def exchange_replicas() -> Callable[[], None]:
    """From now on the replicas of torch's HSDP and of its replicate() exchange by Poseidon. Returns what undoes it.

    Raises ImportError for a torch that has no such models.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_common

    replicated: Any = _fsdp_common.DDPMeshInfo
    inner = replicated.__post_init__

    def __post_init__(self: Any) -> None:
        inner(self)
        self.replicate_process_group = _group_of(self.replicate_process_group)

    replicated.__post_init__ = __post_init__

    def restore() -> None:
        replicated.__post_init__ = inner

    return restore


_made: weakref.WeakKeyDictionary[Any, ProcessGroup] = weakref.WeakKeyDictionary()  # by torch's group of the same ranks


def _group_of(group: dist.ProcessGroup) -> ProcessGroup:
    """The process group of the backend with these ranks, which is made if there is none."""
    if isinstance(group, ProcessGroup):
        return group
    if group not in _made:
        _made[group] = dist.new_group(
            dist.get_process_group_ranks(group), backend=NAME, use_local_synchronization=True, group_desc="replicas"
        )
    return _made[group]
