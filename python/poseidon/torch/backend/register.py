"""Makes the backend known to torch.distributed, by its name, when `poseidon.torch` is imported."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist

from poseidon.errors import InvalidArgument
from poseidon.torch.backend.group import NAME, ProcessGroup
from poseidon.torch.backend.home import WHOLE, Home
from poseidon.torch.process.process_groups import default_group


def _create(opts: Any, _options: Any) -> ProcessGroup:
    """The group that init_process_group or new_group asks for. Collective among its ranks."""
    _refuse_mixed()
    rank, size = opts.group_rank, opts.group_size
    ranks = list(opts.global_ranks_in_group) or list(range(size))
    timeout_s = _seconds(opts.timeout)
    whole = default_group()
    if isinstance(whole, ProcessGroup) and whole.home.has(ranks):
        communicator = whole.home.new_communicator(rank, ranks, opts.group_id)
        return ProcessGroup(whole.home, communicator, rank, size, opts.group_id, timeout_s, owns_home=False)
    home = Home(opts.store, rank, ranks, timeout_s, f"group-{opts.group_id}")
    return ProcessGroup(home, WHOLE, rank, size, opts.group_id, timeout_s, owns_home=True)


def _seconds(timeout: Any) -> float | None:
    """None where the program left torch's default, so that Poseidon's holds."""
    if timeout is None or timeout == dist.distributed_c10d.default_pg_timeout:
        return None
    return float(timeout.total_seconds())


def register() -> None:
    """After this `init_process_group("poseidon")` makes groups of the backend."""
    if not dist.is_available() or NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda", "xpu"])


def _refuse_mixed() -> None:
    """Raises InvalidArgument where Poseidon is one of several backends of the group that torch makes now."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_new_process_group_helper":
        frame = frame.f_back
    config = None if frame is None else frame.f_locals.get("backend_config")
    backends = {} if config is None else config.get_device_backend_map()
    if set(backends.values()) - {NAME}:
        raise InvalidArgument(
            f"backend is {str(config)!r}: torch would lose the other backend; give init_process_group the other one, "
            'and Poseidon to a dimension of a mesh: init_device_mesh(..., backend_override={"replicate": "poseidon"})'
        )
