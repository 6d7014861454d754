"""`poseidon plan`: predicts training on a cluster before it is there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from poseidon.cli.optional import OptionalPath
from poseidon.cli.output import JsonFlag, print_json, print_line, print_table, written
from poseidon.cli.planning import Described, planning_command

if TYPE_CHECKING:
    from poseidon.planner.report import PlanReport

EPILOG = "Example: poseidon plan VGG19 --hosts 4 --link 1gbit"


@planning_command
def plan(
    described: Described,
    html: Annotated[
        OptionalPath,
        typer.Option(metavar="FILE", help="Write the plan as a page with charts here, which needs no other file."),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Predict training on a cluster: its speed, what limits it, what would help, and every layer's exchange.

    Nothing is run: the plan is that of training, and the step is simulated. `poseidon simulate` has details of a step.
    """
    from poseidon.planner import make_report  # help does not wait for the compiled core
    from poseidon.planner.page import write_page

    report = make_report(described.table, described.cluster, described.exchange)
    if html is not None:
        with written("--html", html):
            write_page(report, html)
    if json:
        print_json(report.to_json())
    else:
        _print(report)


def _print(report: PlanReport) -> None:
    from poseidon.report.svg import number_text

    print_line(report.verdict)
    priced = report.cluster.price > 0
    print_table(
        ["hosts", "workers", "step s", "samples/s", "x one host", "efficiency", *["samples/$"] * priced],
        [row.cells(number_text(row.step_s, 4)) for row in report.scaling],
    )
    print_table(
        ["layer or group", "scheme", "MiB sent", "ms", "hidden", "why"],
        [
            [
                row.name,
                row.scheme,
                number_text(row.sent_bytes / 2**20),
                number_text(row.exchange_s * 1e3),
                row.hidden,
                row.why,
            ]
            for row in report.units
        ],
    )
    if report.racks is not None:
        print_table(*report.racks.table())
    for line in report.notes():
        print_line(line)
