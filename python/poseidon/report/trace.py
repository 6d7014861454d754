"""The recorded steps in the trace-event format that Perfetto and chrome://tracing open.

A process is a rank; its threads are its compute and one line per layer's synchronization.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from poseidon.report.data import RankRecord, Report

COMPUTE_THREAD = 1


def trace_events(report: Report) -> dict[str, Any]:
    """The trace as a JSON object: complete events ("X", µs) and names ("M")."""
    earliest_ns = min((span.start_ns - record.origin_ns for record in report.ranks for span in record.spans), default=0)
    events: list[dict[str, Any]] = []
    for record in report.ranks:
        events += _names(record)
        events += _spans(record, record.origin_ns + earliest_ns)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(report.environment)}


def write_trace(report: Report, path: str | os.PathLike[str]) -> None:
    """Writes `trace_events(report)` to `path`."""
    Path(path).write_text(json.dumps(trace_events(report), separators=(",", ":")))


def _threads(record: RankRecord) -> dict[str, int]:
    """Thread ids of the layers: in the table's order, then layers that only have spans."""
    names = dict.fromkeys(row.name for row in record.layers)
    names.update(dict.fromkeys(span.layer for span in record.spans if span.kind == "synchronization"))
    return {name: COMPUTE_THREAD + 1 + index for index, name in enumerate(names)}


def _names(record: RankRecord) -> list[dict[str, Any]]:
    schemes = {row.name: row.scheme for row in record.layers}
    threads = {"compute": COMPUTE_THREAD}
    for name, thread in _threads(record).items():
        threads[f"{name} ({schemes[name]})" if name in schemes else name] = thread

    def named(event: str, thread: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": event, "pid": record.rank, "tid": thread, "args": args}

    events = [
        named("process_name", 0, name=f"rank {record.rank} on {record.host}"),
        named("process_sort_index", 0, sort_index=record.rank),
    ]
    for name, thread in threads.items():
        events.append(named("thread_name", thread, name=name))
        events.append(named("thread_sort_index", thread, sort_index=thread))
    return events


def _spans(record: RankRecord, zero_ns: int) -> list[dict[str, Any]]:
    rows = {row.name: row for row in record.layers}
    threads = _threads(record)
    events = []
    for span in sorted(record.spans, key=lambda span: (span.start_ns, -span.end_ns)):
        synchronizes = span.kind == "synchronization"
        args: dict[str, Any] = {"step": span.step}
        if synchronizes and span.layer in rows:
            row = rows[span.layer]
            args.update(scheme=row.scheme, bytes_sent=round(row.bytes_sent), factor_count=row.factor_count)
        events.append(
            {
                "ph": "X",
                "name": span.layer or span.kind,
                "cat": span.kind,
                "pid": record.rank,
                "tid": threads[span.layer] if synchronizes else COMPUTE_THREAD,
                "ts": (span.start_ns - zero_ns) / 1e3,
                "dur": span.duration_ns / 1e3,
                "args": args,
            }
        )
    return events
