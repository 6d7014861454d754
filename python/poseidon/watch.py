"""Shows the workers of this machine, or of several, while they train (docs/watching.md).

Here is the table of `poseidon top`, what the admin port of `poseidon metrics` answers, and how others ask it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from http import HTTPStatus
from itertools import groupby

from rich import box
from rich.markup import escape
from rich.table import Table

from poseidon.admin import Address, HttpClient
from poseidon.admin.answer import Answer, json_answer, text_answer, to_read
from poseidon.admin.prometheus import CONTENT_TYPE, Metric, families, labels
from poseidon.errors import PoseidonError
from poseidon.live import LinkFigures, WorkerFigures
from poseidon.rates import rate_text

_LEAST_SHARE = 0.05  # of a step: less is within what steps differ by


@dataclass(frozen=True)
class Lateness:
    """The worker that comes last. `layer`: before whose gradient it loses most; empty: before the first gradient."""

    rank: int
    seconds: float
    layer: str


def latest_worker(workers: Sequence[WorkerFigures]) -> Lateness | None:
    """The worker of one job that is late; None if none is by much, or too little is known.

    No common clock is needed. A layer's result comes to all at about the same time, so whoever waits least for it has
    contributed last.
    """
    common = [layer.name for layer in workers[0].layers] if len(workers) > 1 else []
    times = [{layer.name: layer.seconds for layer in worker.layers} for worker in workers]
    common = [name for name in common if all(name in one for one in times)]
    found: Lateness | None = None
    for worker, own in zip(workers, times, strict=True):
        others = [one for one in times if one is not own]
        late = [statistics.median(one[name] for one in others) - own[name] for name in common]
        if late and (found is None or max(late) > found.seconds):
            found = Lateness(worker.rank, max(late), _where(common, late))
    step_s = statistics.median(worker.step_s for worker in workers) if workers else 0.0
    return found if found is not None and found.seconds > _LEAST_SHARE * step_s else None


def _where(names: Sequence[str], late: Sequence[float]) -> str:
    """Before which gradient the lateness grows most, up to where it is largest."""
    end = late.index(max(late))
    growth = [after - before for before, after in zip((0.0, *late[:end]), late[: end + 1], strict=True)]
    place = growth.index(max(growth))
    return names[place] if place else ""


_COLUMNS = ("rank", "host", "step", "step time", "stall", "bytes a step", "coded", "slowest link", "late")
_SILENT_S = 5.0
_RUN_LETTERS = 8


def is_silent(worker: WorkerFigures) -> bool:
    """Whether its last step lasts, or its pause after it, far longer than steps did."""
    return time.time() - worker.written_at > max(_SILENT_S, 3 * worker.step_s)


def tables(workers: Sequence[WorkerFigures]) -> Iterator[Table]:
    """One for each run: two runs may have a job of the same name."""
    by_run = [list(group) for _, group in groupby(workers, key=lambda one: one.run_key)]
    names = [group[0].job for group in by_run]
    for group in by_run:
        more = f" (run {group[0].run[:_RUN_LETTERS]})" if names.count(group[0].job) > 1 else ""
        yield _table(group[0].job + more, group)


def _table(job: str, workers: list[WorkerFigures]) -> Table:
    active = [worker for worker in workers if not is_silent(worker)]
    late = latest_worker(active) if active else None
    first = workers[0]
    title = f"job {escape(job)}, generation {first.generation}: {len(workers)} of {first.world_size} workers"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for column in _COLUMNS:
        table.add_column(column, overflow="fold")
    for worker in workers:
        text = ""
        if worker not in active:
            text = f"silent for {time.time() - worker.written_at:.0f} s"
        elif late is not None and late.rank == worker.rank:
            where = f"before {late.layer}" if late.layer else "before the first gradient"
            text = f"{_milliseconds(late.seconds)}, {where}"
        table.add_row(*_cells(worker), escape(text))
    return table


def _cells(worker: WorkerFigures) -> tuple[str, ...]:
    share = worker.stall_s / worker.step_s if worker.step_s else 0.0
    return (
        str(worker.rank),
        escape(worker.host),
        str(worker.step),
        _milliseconds(worker.step_s),
        f"{_milliseconds(worker.stall_s)} ({100 * share:.0f} %)",
        ", ".join(f"{scheme} {size / 1e6:.2f} MB" for scheme, size in sorted(worker.bytes_by_scheme.items())),
        _coded(worker),
        _link(worker.slowest_link),
    )


def _coded(worker: WorkerFigures) -> str:
    """What part of the bytes is left by coding."""
    plain = worker.plain_bytes_sent + worker.plain_bytes_received
    coded = worker.bytes_sent + worker.bytes_received
    return f"{100 * coded / plain:.0f} %" if coded < plain else ""


def _link(link: LinkFigures | None) -> str:
    if link is None or link.bits_per_s is None:
        return ""
    resent = f", {link.resent_packets} resent" if link.resent_packets else ""
    return f"{link.peer} {rate_text(link.bits_per_s)}{resent}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


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
