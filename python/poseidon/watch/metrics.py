"""The figures of workers in Prometheus's text format."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from poseidon.admin import family, labels
from poseidon.live import WorkerFigures


@dataclass(frozen=True)
class _Metric:
    name: str
    kind: str
    help: str
    value: Callable[[WorkerFigures], float]


_OF_A_WORKER = (
    _Metric("step_seconds", "gauge", "Time of a step, mean of the last second or so.", lambda one: one.step_s),
    _Metric("stall_seconds", "gauge", "Of it, time in which training waited for results.", lambda one: one.stall_s),
    _Metric("steps_total", "counter", "Steps in this generation of the job.", lambda one: one.step),
    _Metric("stalled_seconds_total", "counter", "Time waited for results.", lambda one: one.stalled_total_s),
    _Metric("sent_bytes_total", "counter", "Bytes that the process has sent.", lambda one: one.bytes_sent),
    _Metric("received_bytes_total", "counter", "Bytes that it has received.", lambda one: one.bytes_received),
    _Metric("generation", "gauge", "Rises when the job recovers.", lambda one: one.generation),
    _Metric("world_size", "gauge", "Workers of the job.", lambda one: one.world_size),
    _Metric("silent_seconds", "gauge", "Time since these figures.", lambda one: max(0.0, time.time() - one.written_at)),
)


def metrics_text(workers: Sequence[WorkerFigures]) -> str:
    """The text for these workers. All labels have the worker's job, its run and its rank."""
    lines: list[str] = []
    for metric in _OF_A_WORKER:
        samples = [(_labels(one), metric.value(one)) for one in workers]
        lines += family(f"poseidon_worker_{metric.name}", metric.kind, metric.help, samples)
    lines += family(
        "poseidon_worker_step_bytes",
        "gauge",
        "Bytes sent and received in one step, by scheme.",
        [
            (_labels(one, scheme=scheme), size)
            for one in workers
            for scheme, size in sorted(one.bytes_by_scheme.items())
        ],
    )
    lines += family(
        "poseidon_layer_exchange_seconds",
        "gauge",
        "From a layer's gradient to its result, in one step. The worker with the least is the last to contribute.",
        [
            (_labels(one, layer=layer.name, scheme=layer.scheme), layer.seconds)
            for one in workers
            for layer in one.layers
        ],
    )
    return "\n".join(lines + _link_lines(workers)) + "\n"


def _link_lines(workers: Sequence[WorkerFigures]) -> list[str]:
    links = [(_labels(one, peer=link.peer), link) for one in workers for link in one.links]
    rates = [(labelled, link.bits_per_s) for labelled, link in links if link.bits_per_s is not None]
    return [
        *family("poseidon_link_bits_per_second", "gauge", "Rate to an address while something is sent.", rates),
        *family(
            "poseidon_link_round_trip_seconds",
            "gauge",
            "The kernel's estimate, with the time in queues.",
            [(labelled, link.round_trip_s) for labelled, link in links],
        ),
        *family(
            "poseidon_link_resent_packets_total",
            "counter",
            "Packets that were lost and sent again.",
            [(labelled, link.resent_packets) for labelled, link in links],
        ),
    ]


def _labels(worker: WorkerFigures, **more: object) -> str:
    return labels(job=worker.job, run=worker.run, rank=worker.rank, **more)
