"""`poseidon bench exchange`: its options, table and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from poseidon.bench.exchange.methods import (
    ABLATIONS,
    FEW_SERVERS_HELP,
    METHOD_HELP,
    PLACEMENTS,
    parse_methods,
    parse_placement,
    parse_workload,
)
from poseidon.bench.exchange.plot import exchange_plot
from poseidon.bench.exchange.results import ExchangeConfig, ExchangeResult
from poseidon.bench.exchange.run import run_exchange
from poseidon.bench.network_options import network_words
from poseidon.bench.progress import run_all
from poseidon.cli.network import RENO, CongestionOption, QueueOption
from poseidon.cli.output import JsonFlag, print_results, result_table
from poseidon.models import MODELS
from poseidon.rates import parse_rate
from poseidon.testbed import MOST_PORTS

_MIB = 2**20
_LOOPBACK: list[str | None] = [None]
_DEFAULT_METHODS = "poseidon,gloo,mpi,tcp-copy"

EPILOG = "\n\n".join(
    (
        "Example: poseidon bench exchange --model VGG19 --model ResNet-50 --hosts 8 --link 625mbit",
        "That is the line rate: dense exchange against plain copies and Gloo on shaped ports (needs root). With other "
        "numbers of hosts:",
        "poseidon bench exchange --model VGG19 --model ResNet-50 --hosts 2 --hosts 4 --hosts 16 --link 156mbit",
        "Two processes on loopback: TCP, and shared memory, against Gloo and two plain copies at once; processor time "
        "and memory are columns of every table:",
        "poseidon bench exchange --model tensors:1x256MB --sweep transport=shm",
        "Many small tensors against one large one:",
        "poseidon bench exchange --model tensors:10000x1KB --model tensors:1x10MB --steps 20",
        "Tall against wide, key by core against worker by interface, order of the sum (Parameter Hub §4.5):",
        "poseidon bench exchange --model ResNet-50 --scale 1 --methods tcp-copy --ablation aggregation "
        "--ablation assignment --ablation reduce_order",
        "Chunk size, connections and cores (§4.6):",
        "poseidon bench exchange --model ResNet-50 --scale 1 --methods tcp-copy --plot sweeps.svg "
        "--sweep chunk_bytes=32k,64k,128k,256k,512k,1M,2M --sweep flows=1,2,4 --sweep server_cores=1,2",
        "Where the servers are (Figure 4):",
        "poseidon bench exchange --model VGG19 --hosts 4 --link 625mbit --placement cc --placement cs "
        "--placement ncc --placement ncs",
        "One and two ports per host, all used at once:",
        "poseidon bench exchange --model VGG19 --link 100mbit --ports 1 --ports 2 --methods poseidon,tcp-copy",
        "Reduce kernels against a memory copy: make core-bench.",
    )
)


def _help(what: str, descriptions: dict[str, str]) -> str:
    return what + "; ".join(f"{name}: {text}" for name, text in descriptions.items())


def exchange(
    model: Annotated[
        list[str],
        typer.Option(help=f"One of {', '.join(MODELS)}, or tensors:COUNTxBYTES; may be repeated."),
    ],
    hosts: Annotated[list[int] | None, typer.Option(help="Workers, a host each; may be repeated. Default: 2.")] = None,
    link: Annotated[
        list[str] | None,
        typer.Option(help="Rate of every port, such as 625mbit; may be repeated. Without it: loopback, unshaped."),
    ] = None,
    ports: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            max=MOST_PORTS,
            help="Ports of every host, each shaped at the link's rate; may be repeated. Poseidon and the plain copies "
            "use all of them at once, Gloo and MPI the first. Default: 1.",
        ),
    ] = None,
    placement: Annotated[
        list[str] | None,
        typer.Option(
            help=_help(
                "Where the servers are; may be repeated. Default: cs. ",
                {name: placement.description for name, placement in PLACEMENTS.items()} | FEW_SERVERS_HELP,
            )
        ),
    ] = None,
    scale: Annotated[int, typer.Option(min=1, help="Divisor of a model's weight dimensions.")] = 4,
    methods: Annotated[str, typer.Option(help=_help("Methods, separated by commas: ", METHOD_HELP))] = _DEFAULT_METHODS,
    option: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE of an option of Poseidon, for all its methods; may be repeated."),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=VALUE,VALUE,… of an option of Poseidon, such as chunk_bytes=32k,256k, flows=1,2,4 or "
            "server_cores=1,2: a method for each value, in the same run; may be repeated."
        ),
    ] = None,
    ablation: Annotated[
        list[str] | None,
        typer.Option(help=f"A sweep over all values of one of {', '.join(ABLATIONS)}; may be repeated."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps per round.")] = 5,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds per method; methods take turns.")] = 3,
    mtu: Annotated[int, typer.Option(help="Bytes of the largest IP packet; 9000 for jumbo frames.")] = 1500,
    congestion: CongestionOption = RENO,
    queue_ms: QueueOption = None,
    timeout: Annotated[float, typer.Option(help="Seconds that a step may take.")] = 300.0,
    plot: Annotated[
        Path | None, typer.Option(help="Write an SVG of goodput against the plain copy, and of the sweeps, here.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Exchanges a network's gradients step after step, without any computation between the steps.

    Goodput is the payload that one worker must send (with ncs:N one server, if that is more), by closed form, over the
    median step; the plain copy sends as many bytes from every host to the next, all at once. Timeouts are timers that
    TCP has waited for to send lost packets again, on all hosts and in all steps.
    """
    chosen = parse_methods(methods, option or (), sweep or (), ablation or ())
    for rate in link or ():
        parse_rate(rate)
    configs = [
        ExchangeConfig(
            workload=workload,
            worker_count=host_count,
            link=rate,
            placement=place,
            methods=chosen,
            step_count=steps,
            repeat_count=repeats,
            mtu=mtu,
            timeout_seconds=timeout,
            port_count=port_count,
            testbed={"congestion": congestion.value, "queue_ms": queue_ms},
        )
        for workload, host_count, rate, port_count, place in product(
            [parse_workload(name, scale) for name in model],
            hosts or [2],
            link or _LOOPBACK,
            ports or [1],
            [parse_placement(name) for name in placement or ["cs"]],
        )
    ]
    results = run_all(configs, _name, run_exchange, plot, exchange_plot)
    print_results(results, as_json, _rendered)


def _name(config: ExchangeConfig) -> str:
    return f"{config.workload.name} ×{config.worker_count} {config.placement.name} {config.link or 'loopback'}"


def _rendered(result: ExchangeResult) -> Iterator[RenderableType]:
    yield _table(result)
    for name, reason in result.skipped.items():
        yield Text(f"{name} was left out: {reason}")


def _table(result: ExchangeResult) -> RenderableType:
    title = (
        f"{result.model}: {result.tensor_count} tensors, {result.size_bytes / _MIB:.2f} MiB, the largest "
        f"{result.largest_tensor_bytes / _MIB:.2f} MiB; {result.hosts} workers, {result.placement}, "
        f"{result.network}, {network_words(result.testbed) if result.link else 'unshaped'}"
    )
    heads = ("method", "step ms", "goodput Mb/s", "of the copy", "against Gloo", "CPU s/GB")
    rows = (
        (
            entry.method,
            f"{1e3 * entry.median_seconds:.2f}",
            f"{entry.goodput_bits_per_second / 1e6:.1f}",
            "" if entry.copy_ratio is None else f"{entry.copy_ratio:.3f}",
            "" if entry.gloo_ratio is None else f"{entry.gloo_ratio:.2f}",
            f"{entry.cpu_seconds_per_gb:.2f}",
            f"{entry.memory_bytes / _MIB:.1f}",
            f"{entry.memory_peak_bytes / _MIB:.1f}",
            "" if entry.timeouts is None else str(entry.timeouts),
        )
        for entry in result.methods
    )
    return result_table(title, (*heads, "memory MiB", "peak MiB", "timeouts"), rows)
