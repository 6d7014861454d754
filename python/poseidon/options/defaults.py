"""The defaults that depend on the machine or on other options, which options.def marks with `by_machine`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from poseidon import _core
from poseidon.dscp import default_classes, default_dscp


def available_cpu_count() -> int:
    """Cores that this process may use: those that it may run on, and no more than its containers' quotas pay for."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _core.container_processors()
    return count if quota is None else max(1, min(count, int(quota)))


def _server_cores(values: Mapping[str, Any]) -> int:
    # The framework computes on the same cores: a quarter of them moves gradients. A worker with few needs a core
    # beside its own thread where the kernel does the copying; in shared memory two would only compete for the cache.
    cores = available_cpu_count() // values["local_world_size"]
    on_one_host = values["transport"] == "shm" or (
        values["transport"] == "auto" and values["local_world_size"] == values["world_size"]
    )
    return min(4, max(cores // 4, 0 if on_one_host or cores == 0 else 1))


# Each gets the values of the options that have been given or have a constant default, and of those before it.
BY_MACHINE: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "compute_threads": lambda values: min(8, max(1, available_cpu_count() // values["local_world_size"])),
    "server_cores": _server_cores,
    "priority_classes": lambda values: default_classes(values["world_size"], bool(values["servers"])),
    "dscp": lambda values: tuple(map(str, default_dscp(values["priority_classes"]))),
    "flight_record": lambda values: tempfile.gettempdir(),
}
