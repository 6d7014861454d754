"""The report of a run whose workers have recorded steps (option `record`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from statistics import median

from poseidon.adapter.run_record import RunRecord
from poseidon.rates import rate_text
from poseidon.report.data import RankRecord, Report, Span
from poseidon.report.steps import rank_record
from poseidon.version import VERSION


def report_of_run(records: Sequence[RunRecord], other_step_s: Mapping[str, float] | None = None) -> Report:
    """The report. `records` are those of all ranks, by rank (`load_run`).

    `other_step_s` has the steps of other methods beside which the run is shown, by name.
    """
    first = records[0]
    origins = _origins(records)
    hosts = len({record.host for record in records})
    given = {name: value for name, value in first.options.items() if name in ("scheme", "wire", "lossy", "schedule")}
    rate = first.link_bytes_per_s
    steps = f"steps {first.first_step} to {first.first_step + len(first.steps) - 1}"
    return Report(
        title=first.title,
        subtitle=f"{steps.capitalize()} of {first.world_size} workers on {hosts} host{'s' * (hosts > 1)}.",
        environment=[
            ("Job", first.job),
            ("Hosts", ", ".join(dict.fromkeys(record.host for record in records))),
            ("Ports carried", "not known" if rate is None else rate_text(8 * rate)),
            *((name, str(value)) for name, value in given.items() if value != ""),
            ("Poseidon", VERSION),
        ],
        epochs=[],
        losses=[],
        other_step_s=dict(other_step_s or {}),
        ranks=[replace(_rank(record), origin_ns=origins[record.boot]) for record in records],
    )


def _origins(records: Sequence[RunRecord]) -> dict[str, int]:
    """What each machine's clock said when that of rank 0 said 0.

    A result comes to all workers at about the same time, so clocks differ by what the times of results differ by.
    """
    first = records[0]
    origins = {first.boot: 0}
    for record in records:
        if record.boot not in origins:
            pairs = zip(_completed(record), _completed(first), strict=False)
            origins[record.boot] = round(median([own - other for own, other in pairs]))
    return origins


def _completed(record: RunRecord) -> Iterator[int]:
    """When each layer's result was there, in an order that all ranks have."""
    for step in record.steps:
        yield from (layer.completed_ns for layer in sorted(step.layers, key=lambda layer: layer.name))


def _rank(record: RunRecord) -> RankRecord:
    passes = list(_passes(record))
    return rank_record(
        record.rank, record.host, record.world_size, record.plan, record.steps, passes, record.first_step
    )


def _passes(record: RunRecord) -> Iterator[Span]:
    """What the training loop does. The optimizer and the next input come between two steps."""
    for number, (step, later) in enumerate(zip_longest(record.steps, record.steps[1:]), record.first_step):
        # With overlap it is the next forward pass that waits.
        end_ns = step.backward_end_ns + (0 if record.overlap else step.waited_ns)
        forward_ns = min(step.forward_begin_ns or step.backward_begin_ns, step.backward_begin_ns)
        yield Span("forward", number, forward_ns, step.backward_begin_ns)
        yield Span("backward", number, step.backward_begin_ns, end_ns)
        if later is not None and end_ns < later.forward_begin_ns:
            yield Span("update", number, end_ns, later.forward_begin_ns)
