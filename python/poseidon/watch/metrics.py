"""The figures of workers in Prometheus's text format."""

from __future__ import annotations

import time
from collections.abc import Sequence

from poseidon.admin import Metric, families, labels
from poseidon.live import WorkerFigures

_OF_A_WORKER = (
    Metric("step_seconds", "gauge", "step_s", "Time of a step, mean of the last second or so."),
    Metric("stall_seconds", "gauge", "stall_s", "Of it, time in which training waited for results."),
    Metric("steps_total", "counter", "step", "Steps in this generation of the job."),
    Metric("stalled_seconds_total", "counter", "stalled_total_s", "Time waited for results."),
    Metric("sent_bytes_total", "counter", "bytes_sent", "Bytes that the process has sent."),
    Metric("received_bytes_total", "counter", "bytes_received", "Bytes that it has received."),
    Metric("generation", "gauge", "generation", "Rises when the job recovers."),
    Metric("world_size", "gauge", "world_size", "Workers of the job."),
    Metric("silent_seconds", "gauge", "silent_s", "Time since these figures."),
)
_OF_A_SCHEME = (Metric("step_bytes", "gauge", "bytes", "Bytes sent and received in one step, by scheme."),)
_OF_A_LAYER = (
    Metric(
        "exchange_seconds",
        "gauge",
        "seconds",
        "From a layer's gradient to its result, in one step. The worker with the least is the last to contribute.",
    ),
)
_OF_A_LINK = (
    Metric("bits_per_second", "gauge", "bits_per_s", "Rate to an address while something is sent."),
    Metric("round_trip_seconds", "gauge", "round_trip_s", "The kernel's estimate, with the time in queues."),
    Metric("resent_packets_total", "counter", "resent_packets", "Packets that were lost and sent again."),
)


def metrics_text(workers: Sequence[WorkerFigures]) -> str:
    """The text for these workers. All labels have the worker's job, its run and its rank."""
    now = time.time()
    own = [(_labels(one), {**vars(one), "silent_s": max(0.0, now - one.written_at)}) for one in workers]
    schemes = [
        (_labels(one, scheme=scheme), {"bytes": size})
        for one in workers
        for scheme, size in sorted(one.bytes_by_scheme.items())
    ]
    layers = [
        (_labels(one, layer=layer.name, scheme=layer.scheme), vars(layer)) for one in workers for layer in one.layers
    ]
    links = [(_labels(one, peer=link.peer), vars(link)) for one in workers for link in one.links]
    lines = [
        *families("poseidon_worker", _OF_A_WORKER, own),
        *families("poseidon_worker", _OF_A_SCHEME, schemes),
        *families("poseidon_layer", _OF_A_LAYER, layers),
        *families("poseidon_link", _OF_A_LINK, links),
    ]
    return "\n".join(lines) + "\n"


def _labels(worker: WorkerFigures, **more: object) -> str:
    return labels(job=worker.job, run=worker.run, rank=worker.rank, **more)
