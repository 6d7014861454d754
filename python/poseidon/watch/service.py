"""What the admin port of `poseidon metrics` answers, and how others ask it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from http import HTTPStatus

from poseidon.admin import Address, HttpClient
from poseidon.admin.answer import Answer, json_answer, text_answer, to_read
from poseidon.admin.prometheus import CONTENT_TYPE, Metric, families, labels
from poseidon.errors import PoseidonError
from poseidon.live import WorkerFigures

_OF_A_WORKER = (
    Metric("step_seconds", "gauge", "step_s", "Time of a step, mean of the last second or so."),
    Metric("stall_seconds", "gauge", "stall_s", "Of it, time in which training waited for results."),
    Metric("steps_total", "counter", "step", "Steps in this generation of the job."),
    Metric("stalled_seconds_total", "counter", "stalled_total_s", "Time waited for results."),
    Metric("sent_bytes_total", "counter", "bytes_sent", "Bytes that the process has sent."),
    Metric("received_bytes_total", "counter", "bytes_received", "Bytes that it has received."),
    Metric("plain_sent_bytes_total", "counter", "plain_bytes_sent", "What it would have sent without coding."),
    Metric("plain_received_bytes_total", "counter", "plain_bytes_received", "What it would have received so."),
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


class WatchService:
    """Answers requests about the workers that `read` finds. As `poseidon.admin.answer.Service`."""

    open_paths: tuple[str, ...] = ("/healthz",)
    risk = "read the figures of every job"

    def __init__(self, read: Callable[[], Sequence[WorkerFigures]]) -> None:
        self._read = read

    def answer(self, method: str, path: str, query: str, source: str) -> Answer:
        """The answer to a request."""
        found = {
            "/healthz": lambda: text_answer("ok"),
            "/workers": lambda: json_answer(HTTPStatus.OK, {"workers": [asdict(one) for one in self._read()]}),
            "/metrics": lambda: Answer(HTTPStatus.OK, metrics_text(self._read()), CONTENT_TYPE),
        }
        return to_read(method, path, found)


def fetch(addresses: Sequence[Address], token: str | None) -> list[WorkerFigures]:
    """The workers of all these machines, by job and rank. Raises a PoseidonError that names what does not answer."""
    found = []
    for address in addresses:
        answer = HttpClient(address, token, "poseidon metrics").ask("GET", "/workers")
        try:
            found += [WorkerFigures.from_json(fields) for fields in answer["workers"]]
        except (KeyError, TypeError, ValueError, AttributeError):
            raise PoseidonError(
                f"what answers at {address} is no `poseidon metrics` of this version: use one version on all machines"
            ) from None
    return sorted(found, key=lambda one: (one.run_key, one.rank))
