"""Makes the backend known to torch.distributed, by its name, when `poseidon.torch` is imported."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from poseidon.errors import InvalidArgument
from poseidon.torch.backend.group import ProcessGroup
from poseidon.torch.backend.home import WHOLE, Home
from poseidon.torch.process.process_groups import default_group

NAME = "poseidon"


def _create(opts: Any, _options: Any) -> ProcessGroup:
    """The group that init_process_group or new_group asks for. Collective among its ranks."""
    rank, size = opts.group_rank, opts.group_size
    ranks = list(opts.global_ranks_in_group) or list(range(size))
    timeout_s = _seconds(opts.timeout)
    whole = default_group()
    if isinstance(whole, ProcessGroup) and whole.home.has(ranks):
        communicator = whole.home.new_communicator(rank, ranks, opts.store)
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


def refuse_mixed(backend: str) -> None:
    """Raises InvalidArgument for a backend string in which Poseidon is one of several."""
    if NAME in backend and "," in backend:
        raise InvalidArgument(
            f"backend is {backend!r}: torch would lose the other backend; give init_process_group the other one, and "
            'Poseidon to the mesh: init_device_mesh(..., backend_override={"replicate": "poseidon"})'
        )
