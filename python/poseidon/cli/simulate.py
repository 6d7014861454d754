"""`poseidon simulate`: one step of a model on 1 to 10,000 workers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from poseidon.cli.output import JsonFlag, print_json, print_line
from poseidon.cli.planning import Described, planning_command
from poseidon.errors import InvalidArgument

EPILOG = "Example: poseidon simulate VGG19-22K --hosts 1024 --link 25gbit --trace step.json"


@planning_command
def simulate(
    described: Described,
    trace: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", help="Write the step for ui.perfetto.dev here."),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Simulate one training step: message by message up to 64 workers, by classes of equal workers above.

    Dedicated servers, and workers that add up by host or by rack, are simulated by classes, too.
    """
    from poseidon.planner import Planner, write_prediction  # help does not wait for the compiled core
    from poseidon.planner.critical_path import critical_path, path_words, shares
    from poseidon.report import number_text

    planner = Planner(described.table, described.cluster, described.exchange)
    by_message = planner.has_messages
    step = planner.predict_by_message() if by_message else planner.predict()
    if trace is not None:
        try:
            write_prediction(step, trace)
        except OSError as error:
            raise InvalidArgument(f"--trace {trace} cannot be written: {error.strerror}") from None
    if json:
        found = {"by": "message" if by_message else "class", **step.to_json()}
        print_json({**found, "critical_path_s": shares(critical_path(step))})
        return
    how = "message by message" if by_message else "by classes of equal workers"
    print_line(
        f"{described.table.name} on {described.cluster}, {how}: "
        f"a step takes {number_text(step.step_s, 4)} s, of which the accelerator waits "
        f"{number_text(sum(step.exposed_s))} s. {number_text(step.speedup, 4)} x one worker, "
        f"{number_text(step.samples_per_s, 5)} {described.table.sample}s a second. The busiest port moves "
        f"{number_text(step.port_bytes / 2**20, 4)} MiB; what carries most is busy for {number_text(step.busy_s)} s."
    )
    print_line(f"Critical path: {path_words(critical_path(step))}.")
