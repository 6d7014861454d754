"""The step with torch's DistributedDataParallel over Gloo, beside which plans and recorded runs are shown."""

from __future__ import annotations

from math import inf

from poseidon.models import ModelTable
from poseidon.planner.cluster import ClusterSpec
from poseidon.report.svg import number_text, seconds_text

# torch's defaults. A bucket is full when it has this much or more.
_FIRST_BUCKET_BYTES, _BUCKET_BYTES = 1 << 20, 25 << 20


def ddp_step_s(table: ModelTable, cluster: ClusterSpec, number_bytes: int | None = None, scale: int = 1) -> float:
    """How long a step takes. `number_bytes` of each element travel: 2 with torch's hooks of 16 bits. None: all it has.

    Buckets fill as backward goes, and ring all-reduces add them up one after the other: a host's port carries
    2 (P - 1) / P of each in each direction. The next forward pass waits for all. `scale` divides the dimensions of
    weights, and so the buckets by its square. `python bench/planner.py --suite` compares with measured steps.
    """
    workers = cluster.workers
    rate = _bytes_per_s(cluster) if workers > 1 else inf
    free_s = 0.0
    filled, limit = 0.0, _FIRST_BUCKET_BYTES / scale**2
    tensors = _backward(table, cluster.slowest)
    for place, (ready_s, count, size_bytes) in enumerate(tensors):
        filled += size_bytes if number_bytes is None else count * number_bytes
        if filled >= limit or place == len(tensors) - 1:
            hops = 2 * (workers - 1)
            free_s = max(ready_s, free_s) + hops * (filled / workers / rate + cluster.latency_s)
            filled, limit = 0.0, _BUCKET_BYTES / scale**2
    forward_s = sum(forward for forward, _ in table.durations(table.iteration_seconds)) * cluster.slowest
    return forward_s + free_s


def ddp_words(ddp_s: float, step_s: float) -> str:
    """That step beside one with Poseidon."""
    return f"torch's DDP over Gloo: {seconds_text(ddp_s)} a step, {number_text(ddp_s / step_s)} x Poseidon's."


def _backward(table: ModelTable, slowest: float) -> list[tuple[float, int, int]]:
    """When each gradient is there, from the begin of the backward pass, its elements and its bytes."""
    found: list[tuple[float, int, int]] = []
    now_s = 0.0
    both = table.durations(table.iteration_seconds)
    for layer, (_, backward_s) in zip(reversed(table.layers), reversed(both), strict=True):
        now_s += backward_s * slowest
        tensors = zip(layer.tensors.values(), layer.tensor_bytes, strict=True)
        found += [(now_s, count, size_bytes) for count, size_bytes in reversed(list(tensors))]
    return found


def _bytes_per_s(cluster: ClusterSpec) -> float:
    """The slowest of what a ring passes: with several hosts their ports, and the one flow from rack to rack."""
    memory = [cluster.memory_bytes_per_s] if cluster.workers_per_host > 1 else []
    ports = [cluster.payload_bytes_per_s] if cluster.hosts > 1 else []
    uplinks = [cluster.uplink_bytes_per_s] if cluster.racks > 1 else []
    return min(memory + ports + uplinks)
