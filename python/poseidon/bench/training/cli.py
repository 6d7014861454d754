"""`poseidon bench train`: its options, its table and its JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType

from poseidon.bench.network_options import PrioritiesOption, ThresholdOption, network_words, priority_options
from poseidon.bench.progress import run_all
from poseidon.bench.training.methods import METHODS, parse_methods
from poseidon.bench.training.plot import efficiency_plot
from poseidon.bench.training.results import TrainConfig, TrainResult
from poseidon.bench.training.run import run_training
from poseidon.cli import network
from poseidon.cli.output import JsonFlag, print_results, result_table
from poseidon.models import DEVICES, MODELS, model_table

_MIB = 2**20
_LOOPBACK: list[str | None] = [None]
_SIZE_HELP = "Poseidon's option of that name. Default: its default over the scale's square."
_DEFAULT_METHODS = "poseidon,wfbp-ps,ddp,ddp-fp16"
_METHOD_HELP = "Methods, separated by commas: " + "; ".join(
    f"{one.name}: {one.description}" for one in METHODS.values()
)


def _training_table(result: TrainResult) -> RenderableType:
    words = ", ".join(filter(None, (result.link, network_words(result.testbed))))
    link = words if result.link else "loopback, unshaped"
    servers = f" and {result.servers} servers" if result.servers else ""
    servers += f" of {result.workers_per_host} workers" if result.workers_per_host > 1 else ""
    copy = result.tcp_copy_bits_per_second
    rate = f"; a plain TCP copy gets {copy / 1e6:.1f} Mb/s" if copy is not None else ""
    title = (
        f"{result.model}: {result.hosts} hosts{servers}, {link}{rate}; scale {result.scale}, K {result.batch}, "
        f"compute {result.compute_seconds:.3g} s"
    )
    samples = f"{model_table(result.model).sample}s/s"
    heads = ("method", "iteration s", "efficiency", "bound", "of bound", "speed-up", samples)
    rows = []
    for entry in result.methods:
        bound, of_bound = result.bound(entry), result.of_bound(entry)
        rows.append(
            (
                entry.method,
                f"{entry.iteration_seconds:.3f}",
                f"{entry.efficiency:.3f}",
                "" if bound is None else f"{bound:.3f}",
                "" if of_bound is None else f"{of_bound:.3f}",
                f"{entry.speedup:.2f}",
                f"{entry.samples_per_second:.1f}",
                f"{entry.measured_bytes / _MIB:.2f}",
                f"{entry.closed_form_bytes / _MIB:.2f}",
                "" if entry.deviation is None else f"{entry.deviation:+.2%}",
                "" if entry.coded_share is None else f"{entry.coded_share:.3f}",
                f"{entry.interface_bytes / _MIB:.2f}",
            )
        )
    return result_table(title, (*heads, "MiB/step", "closed form", "deviation", "coded", "port MiB"), rows)


def _steps_table(result: TrainResult) -> RenderableType:
    rows = [
        (entry.method, " ".join(f"{value:.2f}" for value in result.step_efficiencies(entry)))
        for entry in result.methods
    ]
    return result_table("Efficiency of each step, from the first on", ("method", "steps"), rows, ("method", "steps"))


EPILOG = (
    "Example: poseidon bench train --model VGG19 --hosts 8 --link 156.25mbit --scale 4 --compute 3.6 "
    "--methods poseidon,ddp"
)


def train(
    model: Annotated[list[str], typer.Option(help=f"One of {', '.join(MODELS)}; may be repeated.")],
    hosts: Annotated[int, typer.Option(min=1, help="Replayed hosts, one process and network namespace each.")] = 8,
    link: Annotated[
        list[str] | None,
        typer.Option(help="Rate of every port, such as 156mbit; may be repeated. Without it: loopback, unshaped."),
    ] = None,
    servers: Annotated[
        int,
        typer.Option(
            min=0,
            help="Dedicated servers on hosts of their own, for methods that send all to the parameter server. "
            "Default: every worker hosts a shard.",
        ),
    ] = 0,
    workers_per_host: Annotated[
        int,
        typer.Option(
            min=1, help="Workers that share a host's port, for methods that send all to the parameter server."
        ),
    ] = 1,
    scale: Annotated[int, typer.Option(min=1, help="Divisor of weight dimensions and batch.")] = 4,
    compute: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Seconds of compute per iteration. Default: the device's time for the batch, times the scale.",
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Samples per worker before scaling, which set K. Default: the model's.")
    ] = None,
    device: Annotated[
        str, typer.Option(help=f"Whose batch and time per iteration: one of {', '.join(DEVICES)}.")
    ] = "titan-x",
    methods: Annotated[str, typer.Option(help=_METHOD_HELP)] = _DEFAULT_METHODS,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps per round.")] = 3,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds per method; methods take turns.")] = 3,
    cold: Annotated[
        bool,
        typer.Option(
            "--cold",
            help="Measure the first --steps steps of each method, once, with the searches and revisions that users "
            "have, and print the efficiency of each step. An iteration is then their mean.",
        ),
    ] = False,
    chunk_bytes: Annotated[int | None, typer.Option(help=_SIZE_HELP)] = None,
    small_bytes: Annotated[int | None, typer.Option(help=_SIZE_HELP)] = None,
    group_bytes: Annotated[int | None, typer.Option(help=_SIZE_HELP)] = None,
    mtu: Annotated[int, typer.Option(help="Bytes of the largest IP packet; 9000 for jumbo frames.")] = 1500,
    priorities: PrioritiesOption = 2,
    threshold: ThresholdOption = "auto",
    switches: network.SwitchesOption = network.Switches.ignore,
    congestion: network.CongestionOption = network.RENO,
    queue_ms: network.QueueOption = None,
    host_ports: network.HostPortsOption = network.Switches.honour,
    racks: Annotated[int, typer.Option(min=1, help="Racks that the hosts are spread over, and the workers told.")] = 1,
    oversubscription: Annotated[
        float, typer.Option(min=1, help="What a rack's hosts could send over what its uplink carries.")
    ] = 1.0,
    timeout: Annotated[float, typer.Option(help="Seconds that a step may take.")] = 300.0,
    plot: Annotated[Path | None, typer.Option(help="Write an SVG of efficiency by rate and method here.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Trains replayed networks. Compute is slept; parameters, gradients, exchange and update are real.

    Efficiency is the median step of the same processes without exchange over the median step with it. The bound is the
    efficiency that no schedule of the method's bytes can beat on ports that get what plain TCP copies get.
    """
    chosen = tuple(parse_methods(methods))
    tables = [model_table(name, device).with_batch(batch) for name in model]
    given = {"chunk_bytes": chunk_bytes, "small_bytes": small_bytes, "group_bytes": group_bytes}
    options = {name: value for name, value in given.items() if value is not None}
    options |= priority_options(priorities, threshold)
    shaped = network.network_arguments(priorities, switches, racks, oversubscription, congestion, queue_ms, host_ports)
    configs = [
        TrainConfig(
            model=table.name,
            host_count=hosts,
            link=rate,
            scale=scale,
            compute_seconds=compute if compute is not None else table.iteration_seconds * scale,
            methods=chosen,
            step_count=steps,
            repeat_count=1 if cold else repeats,
            cold=cold,
            batch=batch,
            server_count=servers,
            workers_per_host=workers_per_host,
            mtu=mtu,
            timeout_seconds=timeout,
            options=options,
            device=device,
            testbed=shaped,
        )
        for table in tables
        for rate in (link or _LOOPBACK)
    ]
    results = run_all(
        configs, lambda config: f"{config.model} {config.link or 'loopback'}", run_training, plot, efficiency_plot
    )
    print_results(results, as_json, lambda result: [_training_table(result), *([_steps_table(result)] if cold else [])])
