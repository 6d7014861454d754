"""`poseidon bench priority`: what priorities in hosts and network do, after Geryon's figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Annotated

import typer
from rich.console import RenderableType

from poseidon.bench.network_options import PrioritiesOption, ThresholdOption, network_words, priority_options
from poseidon.bench.priority.cost import CHUNK_COUNTS, VGG19_TENSOR_COUNT, CostResult, measure_costs
from poseidon.bench.priority.tables import (
    PAPER_EFFICIENCIES,
    PAPER_METHODS,
    PAPER_MODELS,
    GridConfig,
    GridResult,
    GridRun,
    run_grid,
)
from poseidon.bench.priority.urgent import UrgentConfig, UrgentResult, run_urgent
from poseidon.bench.progress import round_progress
from poseidon.bench.training.methods import METHODS, parse_methods
from poseidon.bench.training.results import MethodResult
from poseidon.cli.network import RENO, CongestionOption, QueueOption, Switches, SwitchesOption, network_arguments
from poseidon.cli.output import JsonFlag, print_results, result_table
from poseidon.cli.shared_options import shared_options
from poseidon.errors import InvalidArgument
from poseidon.options import parse_bytes

app = typer.Typer(
    no_args_is_help=True,
    help="What priorities on hosts and network do (Geryon).",
    epilog="Example: poseidon bench priority urgent --link 100mbit",
)

_DEFAULT_METHODS = ",".join(PAPER_METHODS)
_OVERLAPPED = ", ".join(name for name, method in METHODS.items() if method.overlap)
GigabitsOption = Annotated[
    list[float] | None,
    typer.Option(
        min=0.001,
        help="Gb/s of the real ports, which the testbed's stand for at rate / (scale² · stretch); may be repeated.",
    ),
]


def _bytes(text: str, what: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError:
        raise InvalidArgument(f"{what} is {text!r}: it must be a size such as 4194304 or 4MiB") from None


@app.command(epilog="Example: poseidon bench priority urgent --link 100mbit --repeats 5")
def urgent(
    link: Annotated[str, typer.Option(help="Rate of every port.")] = "100mbit",
    urgent_bytes: Annotated[str, typer.Option(metavar="BYTES", help="Size of the urgent tensor.")] = "4MiB",
    bulk_bytes: Annotated[str, typer.Option(metavar="BYTES", help="Size of the bulk tensor.")] = "32MiB",
    repeats: Annotated[int, typer.Option(min=1, help="Pulls of each kind.")] = 5,
    congestion: CongestionOption = RENO,
    queue_ms: QueueOption = None,
    timeout: Annotated[float, typer.Option(help="Seconds that a pull may take.")] = 300.0,
    as_json: JsonFlag = False,
) -> None:
    """Times an urgent tensor from one server, alone and while a bulk tensor comes from another (Figure 5).

    It does so on switches that honour the packets' code points and on switches that ignore them. There is one flow per
    pair of peers (end hosts order what they send, the network knows nothing), then one for each of two classes.
    """
    sizes = _bytes(urgent_bytes, "urgent-bytes"), _bytes(bulk_bytes, "bulk-bytes")
    config = UrgentConfig(link, *sizes, repeats, timeout, congestion.value, queue_ms)
    with round_progress("urgent") as show:
        result = run_urgent(config, show)
    print_results([result], as_json, _urgent_table)


def _urgent_table(result: UrgentResult) -> Iterator[RenderableType]:
    title = (
        f"{result.urgent_bytes / 2**20:g} MiB pulled while {result.bulk_bytes / 2**20:g} MiB come from another "
        f"server; ports of {result.link}, {result.congestion}"
    )
    rows = (
        (
            "honour DSCP" if delay.honour_dscp else "ignore DSCP",
            "1: end hosts only" if delay.classes == 1 else str(delay.classes),
            f"{1e3 * median(delay.alone_seconds):.1f}",
            f"{1e3 * median(delay.loaded_seconds):.1f}",
            f"{delay.ratio:.2f}",
        )
        for delay in result.delays
    )
    words = ("switches", "classes")
    yield result_table(title, (*words, "alone ms", "with bulk ms", "ratio"), rows, words)


def _grid(
    model: Annotated[
        list[str] | None, typer.Option(help=f"May be repeated. Default: {', '.join(PAPER_MODELS)}.")
    ] = None,
    methods: Annotated[
        str, typer.Option(help=f"Methods of `bench train`, separated by commas; with overlap: {_OVERLAPPED}.")
    ] = _DEFAULT_METHODS,
    scale: Annotated[int, typer.Option(min=1, help="Divisor of weight dimensions and batch.")] = 4,
    stretch: Annotated[float, typer.Option(min=0.001, help="Factor of the K40's compute time.")] = 4.0,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps per round.")] = 3,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds per method; methods take turns.")] = 2,
    priorities: PrioritiesOption = 2,
    threshold: ThresholdOption = "coarse",
    switches: SwitchesOption = Switches.ignore,
    congestion: CongestionOption = RENO,
    queue_ms: QueueOption = None,
) -> GridConfig:
    """The grid of these options, whose rates and numbers of hosts a command gives."""
    return GridConfig(
        scale=scale,
        stretch=stretch,
        step_count=steps,
        repeat_count=repeats,
        models=tuple(model or PAPER_MODELS),
        methods=tuple(parse_methods(methods)),
        options=priority_options(priorities, threshold),
        testbed=network_arguments(priorities, switches, congestion=congestion, queue_ms=queue_ms),
    )


@app.command(epilog="Example: poseidon bench priority tables --model VGG19 --gigabits 10")
@shared_options(_grid)
def tables(
    grid: GridConfig,
    gigabits: GigabitsOption = None,
    hosts: Annotated[int, typer.Option(min=2, help="Workers, a host each.")] = 8,
    as_json: JsonFlag = False,
) -> None:
    """Measures scaling efficiency beside the paper's (Tables II and III) at the K40's times. Default: 10 and 40 Gb/s.

    The bound is what no schedule of a method's bytes can beat at the rate of plain TCP copies on the same ports.
    """
    _print_grid(replace(grid, gigabits_per_second=tuple(gigabits or PAPER_EFFICIENCIES), host_counts=(hosts,)), as_json)


@app.command(epilog="Example: poseidon bench priority scaling --model VGG19 --hosts 1 --hosts 2 --hosts 4")
@shared_options(_grid)
def scaling(
    grid: GridConfig,
    gigabits: GigabitsOption = None,
    hosts: Annotated[
        list[int] | None, typer.Option(min=1, help="Workers; may be repeated. Default: 1, 2, 4, 8.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Measures throughput by the number of workers (Figures 8 and 9) at the K40's times. Default rate: 10 Gb/s."""
    counts = tuple(hosts or (1, 2, 4, 8))
    _print_grid(replace(grid, gigabits_per_second=tuple(gigabits or (10.0,)), host_counts=counts), as_json)


def _print_grid(config: GridConfig, as_json: bool) -> None:
    print_results([run_grid(config, round_progress)], as_json, _grid_tables)


def _grid_tables(grid: GridResult) -> Iterator[RenderableType]:
    for rate in dict.fromkeys(run.gigabits_per_second for run in grid.runs):
        runs = [run for run in grid.runs if run.gigabits_per_second == rate]
        title = f"{rate:g} Gb/s, as ports of {runs[0].result.link}, {network_words(runs[0].result.testbed)}"
        heads = ("model", "workers", "method", "iteration s", "images/s", "efficiency", "paper", "bound")
        rows = (_grid_row(run, entry) for run in runs for entry in run.result.methods)
        yield result_table(title, heads, rows, ("model", "method"))


def _grid_row(run: GridRun, entry: MethodResult) -> list[str]:
    paper, bound = run.paper_efficiency(entry), run.result.bound(entry)
    return [
        run.result.model,
        str(run.result.hosts),
        entry.method,
        f"{entry.iteration_seconds:.3f}",
        f"{entry.samples_per_second:.1f}",
        f"{entry.efficiency:.3f}",
        "" if paper is None else f"{paper:.3f}",
        "" if bound is None else f"{bound:.3f}",
    ]


@app.command(epilog="Example: poseidon bench priority cost --chunks 320 --chunks 1000000")
def cost(
    chunks: Annotated[
        list[int] | None,
        typer.Option(min=1, help=f"Chunks; may be repeated. Default: {', '.join(map(str, CHUNK_COUNTS))}."),
    ] = None,
    layers: Annotated[int, typer.Option(min=1, help="Layers that they belong to.")] = VGG19_TENSOR_COUNT,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each number of chunks.")] = 5,
    as_json: JsonFlag = False,
) -> None:
    """Times a host's scheduling of chunks: class look-up, send queue in and out (Figure 10)."""
    print_results([measure_costs(chunks or CHUNK_COUNTS, layers, repeats)], as_json, _cost_table)


def _cost_table(result: CostResult) -> Iterator[RenderableType]:
    rows = (
        (str(entry.chunk_count), f"{1e3 * median(entry.seconds):.3f}", f"{1e6 * entry.seconds_per_chunk:.3f}")
        for entry in result.costs
    )
    yield result_table(f"{result.layer_count} layers", ("chunks", "all, ms", "each, µs"), rows)
