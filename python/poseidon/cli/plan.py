"""`poseidon plan`: predicts training on a cluster before it is there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from poseidon.cli.output import JsonFlag, print_json, print_line, print_table
from poseidon.cli.planning import Described, planning_command

if TYPE_CHECKING:
    from poseidon.planner import PlanReport

EPILOG = "Example: poseidon plan VGG19 --hosts 4 --link 1gbit"


@planning_command
def plan(
    described: Described,
    json: JsonFlag = False,
) -> None:
    """Predict training on a cluster: its speed, what limits it, what would help, and every layer's exchange.

    Nothing is run: the plan is that of training, and the step is simulated. `poseidon simulate` has details of a step.
    """
    from poseidon.planner import make_report  # help does not wait for the compiled core

    report = make_report(described.table, described.cluster, described.exchange)
    if json:
        print_json(report.to_json())
    else:
        _print(report)


def _print(report: PlanReport) -> None:
    print_line(report.verdict)
    priced = report.cluster.price > 0
    print_table(
        ["hosts", "workers", "step s", "samples/s", "x one host", "efficiency", *["samples/$"] * priced],
        [
            [
                row.hosts,
                row.workers,
                f"{row.step_s:.4g}",
                f"{row.samples_per_s:.4g}",
                f"{row.speedup:.2f}",
                f"{row.efficiency:.3f}",
                *([] if row.samples_per_dollar is None else [f"{row.samples_per_dollar:,.0f}"]),
            ]
            for row in report.scaling
        ],
    )
    print_table(
        ["layer or group", "scheme", "MiB sent", "exchange ms", "hidden", "why"],
        [
            [
                row.name,
                row.scheme,
                f"{row.sent_bytes / 2**20:.3g}",
                f"{row.exchange_s * 1e3:.3g}",
                _hidden(row.exposed_s),
                row.why,
            ]
            for row in report.units
        ],
    )
    for line in report.notes():
        print_line(line)


def _hidden(exposed_s: float) -> str:
    return f"no: {exposed_s * 1e3:.3g} ms" if exposed_s >= 5e-5 else "yes"
