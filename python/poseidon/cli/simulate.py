"""`poseidon simulate`: one step of a model on 1 to 10,000 workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from poseidon.cli.optional import OptionalNumber, OptionalPath
from poseidon.cli.output import JsonFlag, print_json, print_line, written
from poseidon.cli.planning import Described, planning_command

if TYPE_CHECKING:
    from poseidon.planner import Exchange, Pace, Prediction
    from poseidon.planner.pace import PaceResult

EPILOG = "Example: poseidon simulate VGG19-22K --hosts 1024 --link 25gbit --trace step.json"


@planning_command
def simulate(
    described: Described,
    trace: Annotated[
        OptionalPath, typer.Option(metavar="FILE", help="Write the step for ui.perfetto.dev here.")
    ] = None,
    slow: Annotated[float, typer.Option(help="The last worker takes so many times as long for its layers.")] = 1.0,
    slow_share: Annotated[float, typer.Option(help="In this part of its steps.")] = 1.0,
    jitter: Annotated[float, typer.Option(help="Standard deviation of all workers' steps over their mean.")] = 0.0,
    stragglers: Annotated[str, typer.Option(help="Poseidon's option of that name: wait or drop.")] = "wait",
    straggler_factor: Annotated[float, typer.Option(help="Poseidon's option of that name.")] = 3.0,
    straggler_steps: Annotated[int, typer.Option(help="Poseidon's option of that name.")] = 8,
    catches_up: Annotated[
        bool, typer.Option("--catches-up", help="With --stragglers drop: its loop calls missed_steps().")
    ] = False,
    consistency: Annotated[str, typer.Option(help="Poseidon's option of that name: bsp, ssp or async.")] = "bsp",
    staleness: Annotated[int, typer.Option(help="Poseidon's option of that name.")] = 3,
    steps: Annotated[int, typer.Option(help="Of workers that differ in speed, so many steps.")] = 300,
    mtbf: Annotated[
        OptionalNumber, typer.Option(metavar="HOURS", help="Mean time between failures of one worker: what they cost.")
    ] = None,
    rejoin: Annotated[float, typer.Option(metavar="SECONDS", help="What a worker that is replaced costs.")] = 5.1,
    json: JsonFlag = False,
) -> None:
    """Simulate one training step: message by message up to 64 workers, by classes of equal workers above.

    Dedicated servers, and workers that add up by host or by rack, are simulated by classes, too. The options from
    --slow on simulate many steps: what a slow worker costs, what it costs not to wait for it, and failures
    (docs/planning.md).
    """
    from poseidon.planner import Pace, Planner  # help does not wait for the compiled core
    from poseidon.planner.critical_path import critical_path, path_words, shares
    from poseidon.planner.trace import write_prediction
    from poseidon.report.svg import number_text

    pace = Pace(
        *(slow, slow_share, jitter, stragglers, straggler_factor, straggler_steps),
        *(catches_up, consistency, staleness, steps),
    )
    planner = Planner(described.table, described.cluster, _exchange(described.exchange, pace))
    by_message = planner.has_messages
    step = planner.predict_by_message() if by_message else planner.predict()
    if trace is not None:
        with written("--trace", trace):
            write_prediction(step, trace)
    further = _further(step, pace, mtbf, rejoin)
    if json:
        found = {"by": "message" if by_message else "class", **step.to_json()}
        print_json({**found, "critical_path_s": shares(critical_path(step)), **further})
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
    for line in _further_words(step, pace, further):
        print_line(line)


def _exchange(exchange: Exchange, pace: Pace) -> Exchange:
    """Where not all workers are waited for, all layers have the scheme that the rules of training give them."""
    from poseidon.adapter.layer_rules import LayerFacts, LayerRules, LayerWishes

    if pace.waits_for_all:
        return exchange
    rules = LayerRules(small_bytes=0, stragglers=pace.stragglers, consistency=pace.consistency)
    facts = LayerFacts("of a matrix", "float32", 4, rows=2, gives_factors=True)
    return replace(exchange, scheme=rules.terms(rules.layer(facts, LayerWishes(exchange.scheme))).scheme)


def _paced(step: Prediction, pace: Pace) -> PaceResult | None:
    from poseidon.planner import simulate_pace

    if pace.waits_for_all and pace.slow == 1 and not pace.jitter:
        return None
    compute_s = step.table.iteration_seconds
    return simulate_pace(pace, step.cluster.workers, compute_s, max(0.0, step.step_s - compute_s))


def _further(step: Prediction, pace: Pace, mtbf: float | None, rejoin: float) -> dict[str, Any]:
    """What many steps and failures come to, as plain data."""
    from poseidon.planner.pace import time_lost

    found: dict[str, Any] = {}
    if (paced := _paced(step, pace)) is not None:
        found["steps"] = paced.to_json()
    if mtbf is not None:
        every_h, lost = time_lost(mtbf, step.cluster.workers, step.step_s, rejoin)
        found["failures"] = {"every_h": every_h, "time_lost": lost}
    return found


def _further_words(step: Prediction, pace: Pace, found: Mapping[str, Any]) -> Iterator[str]:
    """The same in sentences."""
    from poseidon.report.svg import number_text, percent_text

    if (paced := found.get("steps")) is not None:
        times = paced["step_s"] / step.step_s
        yield (
            f"Over {pace.steps} steps: {number_text(paced['step_s'], 4)} s a step, {number_text(times)} times the one "
            f"above, and {number_text(paced['all_done_s'], 4)} s until the slow worker is done, too."
        )
        if pace.stragglers == "drop":
            yield (
                f"The slow worker's gradients are in {percent_text(paced['counted'])} of the steps. So its examples "
                f"count {number_text(paced['counted'], 2)} times as much as in a mean over all, and the others' "
                f"{number_text(paced['others_weight'])} times. It computes {percent_text(paced['computed'])} of its "
                "batches."
            )
        if pace.consistency != "bsp":
            mean, most = paced["age"]
            yield (
                f"Gradients are computed with parameters that lack {number_text(mean, 2)} steps of the others in the "
                f"mean, and {number_text(most, 2)} at most."
            )
    if (failures := found.get("failures")) is not None:
        yield (
            f"A worker fails every {number_text(failures['every_h'])} hours, which takes "
            f"{number_text(100 * failures['time_lost'], 2)} % of the time."
        )
