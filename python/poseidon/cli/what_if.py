"""`poseidon what-if` and `poseidon report`: what recorded steps of a run say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from poseidon.cli.optional import OptionalFlag, OptionalPath, OptionalText, OptionalWhole
from poseidon.cli.output import JsonFlag, print_json, print_line, print_table, written
from poseidon.errors import InvalidArgument

if TYPE_CHECKING:
    from poseidon.adapter.run_record import RunRecord
    from poseidon.planner.what_if import WhatIf

WHAT_IF_EPILOG = "Example: poseidon what-if records --link 2x --overlap"
REPORT_EPILOG = "Example: poseidon report records --out report"

FolderArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="What the option `record` of the run said. Of several machines: one copy.")
]


def what_if(
    folder: FolderArgument,
    link: Annotated[
        OptionalText,
        typer.Option(metavar="RATE", help="Ports of this rate, such as 10gbit, or so many times as fast: 2x."),
    ] = None,
    hosts: Annotated[OptionalWhole, typer.Option(min=1, help="On so many hosts.")] = None,
    scheme: Annotated[OptionalText, typer.Option(help="With this scheme: auto, ps, sfb …")] = None,
    wire: Annotated[OptionalText, typer.Option(help="With gradients that travel so: fp32, bf16, fp16 or int8.")] = None,
    overlap: Annotated[
        OptionalFlag, typer.Option("--overlap/--no-overlap", help="With a DistributedOptimizer, or without one.")
    ] = None,
    straggler: Annotated[
        bool, typer.Option("--straggler/--no-straggler", help="With the slow worker, if there was one, or without it.")
    ] = True,
    slow_port: Annotated[
        bool, typer.Option("--slow-port/--no-slow-port", help="With the slow port, if there was one, or without it.")
    ] = True,
    html: Annotated[
        OptionalPath, typer.Option(metavar="FILE", help="Write a page with the critical paths here.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Predict what a recorded run would have been: with other ports, hosts or schemes, or without its slow worker.

    Without options it answers the usual questions. It says how far its simulation of the run as it was is from what was
    measured, and what the step's time consists of. See docs/what-if.md for how to record a run.
    """
    from poseidon.adapter.run_record import load_run  # help does not wait for the compiled core
    from poseidon.planner import Change, read_run
    from poseidon.planner import what_if as predict
    from poseidon.planner.path_page import write_what_if

    change = Change(link, hosts, scheme, wire, overlap, straggler, slow_port)
    found = predict(read_run(load_run(folder)), [] if change == Change() else [change])
    if html is not None:
        with written("--html", html):
            write_what_if(found, html)
    if as_json:
        print_json(found.to_json())
    else:
        _print(found)


def _print(found: WhatIf) -> None:
    from poseidon.planner.critical_path import path_words
    from poseidon.report.svg import number_text, seconds_text

    for sentence in found.sentences():
        print_line(sentence)
    print_table(
        ["what if", "step", "speed", "its critical path"],
        [
            [
                one.words,
                seconds_text(one.step.step_s),
                f"{number_text(found.speed(one))} x",
                path_words(one.path, with_layers=False),
            ]
            for one in found.changes
        ],
    )


def _predicted_ddp(records: Sequence[RunRecord]) -> dict[str, float]:
    """What a step would take with torch's DDP; nothing of a run whose times no prediction knows."""
    from poseidon.planner import read_run
    from poseidon.planner.what_if import ddp_step_of

    try:
        return {"torch's DDP over Gloo (predicted)": ddp_step_of(read_run(records))}
    except InvalidArgument:
        return {}


def report(
    folder: FolderArgument,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where report.html and trace.json are written.")] = Path(),
) -> None:
    """Write a page about a recorded run, and its steps for ui.perfetto.dev, all workers on one clock."""
    from poseidon.adapter.run_record import load_run  # help does not wait for the compiled core
    from poseidon.report import report_of_run, write_html, write_trace

    records = load_run(folder)
    found = report_of_run(records, _predicted_ddp(records))
    with written("--out", out):
        out.mkdir(parents=True, exist_ok=True)
        write_html(found, out / "report.html")
        write_trace(found, out / "trace.json")
    print_line(f"{out / 'report.html'} and {out / 'trace.json'}")
