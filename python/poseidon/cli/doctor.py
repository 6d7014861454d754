"""`poseidon doctor`: says from flight records who started a failure, and looks before a run at what may cause one."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from poseidon.cli.optional import OptionalPaths
from poseidon.cli.output import JsonFlag, print_json, print_line, print_table
from poseidon.doctor import Record, diagnose, group, load
from poseidon.errors import InvalidArgument

EPILOG = "\n\n".join(
    (
        "Example: poseidon doctor /tmp/poseidon-default-rank*.json",
        "poseidon doctor --before",
        "On 8 machines: torchrun --nnodes 8 --nproc-per-node 1 --rdzv-endpoint first-machine:29500 "
        "--no-python poseidon doctor --before",
    )
)
_SECONDS = 2.0
_TOLD = ("path", "process", "rank", "host", "pid", "wall_s", "about_rank", "about_server")


def doctor(
    records: Annotated[
        OptionalPaths,
        typer.Argument(help="Flight records, or directories of them; default: the newest failure on this machine."),
    ] = None,
    before: Annotated[
        bool,
        typer.Option(
            "--before", help="Look at this machine instead, and, where a launcher starts it on several, at the network."
        ),
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Read the flight records of a job and say who started its failure and why.

    Every process of a job that fails writes a record and names it at the end of its error message. Bring those of all
    machines together: a process that has left none is as telling as one that has. With --before it looks for what may
    make a run slow or fail, and says how to mend it; the status is 1 if it finds something.
    """
    if before:
        if records:
            raise typer.BadParameter("--before reads no records: leave one of the two out")
        _look_before(json)
        return
    try:
        failures = group(load(records if records else [_default_directory()]))
    except InvalidArgument as error:
        raise typer.BadParameter(str(error)) from None
    if not records:
        failures = failures[-1:]
    if json:
        print_json([_to_json(one) for one in failures])
        return
    for one in failures:
        _print(one)


def _look_before(json: bool) -> None:
    """Status 1 if anything is found."""
    from poseidon.check.before import check_before  # help does not wait for the compiled core

    own, between = check_before(_SECONDS)
    if json:
        print_json(
            {"host": socket.gethostname(), "machine": list(map(asdict, own)), "between": list(map(asdict, between))}
        )
    else:
        for where, findings in ((socket.gethostname(), own), ("the network", between)):
            for one in findings:
                print_line(f"{where}: {one.about}: {one.text}.\n    {one.mend}")
        if not own and not between:
            print_line(f"{socket.gethostname()}: nothing found.")
    if own or between:
        raise typer.Exit(1)


def _default_directory() -> Path:
    from poseidon.options import resolve  # help does not wait for the compiled core

    directory = resolve().flight_record
    if directory == "off":
        raise InvalidArgument("flight_record is off: name the records to read")
    return Path(directory)


def _print(one: Sequence[Record]) -> None:
    first = one[0]
    there = sorted({record.rank for record in one if record.rank is not None})
    missing = [str(rank) for rank in range(first.world_size) if rank not in there]
    print_line(
        f"Job {first.job!r}, generation {first.generation}: {len(one)} records of {first.world_size} ranks"
        + (f", none of rank {', '.join(missing)}" if missing else "")
    )
    print_table(
        ["process", "host", "pid", "when", "learnt", "error", "waiting for"], [_row(record, one) for record in one]
    )
    print_line(f"Verdict: {diagnose(list(one)).text}.")


def _row(record: Record, one: Sequence[Record]) -> list[str]:
    about = f" rank {record.about_rank}" if record.about_rank is not None and record.how != "silent" else ""
    about = f" server {record.about_server}" if record.about_server is not None else about
    waiting = record.waiting[0] if record.waiting else None
    more = f" and {record.waiting_count - 1} more" if record.waiting_count > 1 else ""
    return [
        _process(record),
        record.host,
        str(record.pid),
        _when(record, one),
        record.how + about,
        record.code,
        f"{waiting.layer} step {waiting.step}: {waiting.text}{more}" if waiting else "nothing",
    ]


def _process(record: Record) -> str:
    return f"rank {record.rank}" if record.rank is not None else "server"


def _when(record: Record, one: Sequence[Record]) -> str:
    """The time of day of the first record of each machine; those of the same clock relative to it."""
    same_clock = [other for other in one if record.seconds_after(other) is not None]
    first = min(same_clock, key=lambda other: other.monotonic_s, default=record)
    after_s = record.seconds_after(first)
    if after_s:
        return f"+{after_s:.3f} s"
    return time.strftime("%H:%M:%S", time.localtime(record.wall_s)) + f".{int(record.wall_s * 1000) % 1000:03d}"


def _to_json(one: Sequence[Record]) -> dict[str, Any]:
    first = one[0]
    return {
        "job": first.job,
        "run": first.run,
        "generation": first.generation,
        "world_size": first.world_size,
        "verdict": asdict(diagnose(list(one))),
        "records": [
            {
                **{name: getattr(record, name) for name in _TOLD},
                "learnt": record.how,
                "error": {"code": record.code, "message": record.message},
                "waiting": [waiting.text for waiting in record.waiting],
            }
            for record in one
        ],
    }
