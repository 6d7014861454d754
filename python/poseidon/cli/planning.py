"""Options of `poseidon plan` and `poseidon simulate`: the model, the cluster, the exchange."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from poseidon.cli.optional import OptionalNumber, OptionalPath, OptionalText, OptionalTexts, OptionalWhole
from poseidon.cli.shared_options import shared_options
from poseidon.errors import InvalidArgument

if TYPE_CHECKING:
    from poseidon.models import ModelTable
    from poseidon.planner import ClusterSpec, Exchange

_OF_THE_FILE = "Beats the cluster file."
_AS_TRAINING = "Default: what training would take from its environment and poseidon.toml."


def read_model(
    name: str, arguments: Sequence[str], device: str, batch: int | None, compute: float | None
) -> ModelTable:
    """The layer table for options of these names. Raises InvalidArgument for what is no model, device or time.

    A script is run for a few steps, and so is a model from Python.
    """
    from poseidon.models import model_table  # help does not wait for numpy

    is_script, is_object = name.endswith(".py"), ":" in name
    if is_script and batch is not None:
        raise InvalidArgument(f"--batch {batch} with a script: give {name} the batch by its own arguments")
    if is_object and batch is not None:
        raise InvalidArgument(f"--batch {batch} with {name}: it has a batch of its own")
    if arguments and not is_script:
        raise InvalidArgument(f"{' '.join(arguments)} after {name}, which is no script: leave it out")
    if is_script or is_object:
        from poseidon.cli.measured_script import measure_object, measure_script  # help does not wait for numpy

        table = measure_script(Path(name), arguments) if is_script else measure_object(name)
    else:
        table = model_table(name, device)
    if compute is not None and not 0 < compute < float("inf"):
        raise InvalidArgument(f"--compute is {compute:g}: it must be above 0 seconds")
    table = table.with_batch(batch)
    if compute is not None:
        table = replace(table, iteration_seconds=compute, iteration_source="--compute")
    return table


def read_cluster(file: Path | None, **flags: object) -> ClusterSpec:
    """The cluster of a file and of options, by the names that the file has for them."""
    # Help does not wait for the compiled core.
    from poseidon.planner.cluster import Setting, make_cluster, read_settings

    settings = {} if file is None else read_settings(file)
    settings |= {
        name: Setting(value, f"--{name.replace('_', '-')}") for name, value in flags.items() if value is not None
    }
    return make_cluster(settings)


@dataclass(frozen=True)
class Described:
    """What the options describe."""

    table: ModelTable
    cluster: ClusterSpec
    exchange: Exchange


def _described(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help=(
                "A network, such as VGG19 (the error for an unknown one names all), a training script: train.py, or a "
                "model with a batch in Python: module:object."
            ),
        ),
    ],
    arguments: Annotated[
        OptionalTexts, typer.Argument(metavar="[-- ARGUMENTS]", help="The script's own arguments, after a --.")
    ] = None,
    cluster: Annotated[
        OptionalPath,
        typer.Option(metavar="FILE", help="A cluster file (docs/planning.md). The options below stand for its lines."),
    ] = None,
    hosts: Annotated[OptionalWhole, typer.Option(help=f"Hosts with a port each. {_OF_THE_FILE}")] = None,
    link: Annotated[
        OptionalText,
        typer.Option(metavar="RATE", help=f"Rate of each port and direction, such as 10gbit. {_OF_THE_FILE}"),
    ] = None,
    workers_per_host: Annotated[
        OptionalWhole, typer.Option(help=f"Workers (accelerators) of each host, which share its port. {_OF_THE_FILE}")
    ] = None,
    servers: Annotated[
        OptionalWhole,
        typer.Option(help=f"Dedicated servers on hosts of their own. Default: every worker hosts one. {_OF_THE_FILE}"),
    ] = None,
    racks: Annotated[OptionalWhole, typer.Option(help=f"Racks that the hosts are spread over. {_OF_THE_FILE}")] = None,
    oversubscription: Annotated[
        OptionalNumber,
        typer.Option(help=f"What a rack's hosts could send over what its uplink carries. {_OF_THE_FILE}"),
    ] = None,
    device: Annotated[
        str,
        typer.Option(help="Accelerator whose batch and time the papers give. The error for an unknown one names all."),
    ] = "titan-x",
    compute: Annotated[
        OptionalNumber,
        typer.Option(
            metavar="SECONDS", help="What a step takes on one of your accelerators alone. Default: the device's."
        ),
    ] = None,
    batch: Annotated[
        OptionalWhole,
        typer.Option(min=1, help="Samples of one worker and step. Without --compute the time is in proportion."),
    ] = None,
    scheme: Annotated[
        OptionalText, typer.Option(help=f"Poseidon's option of that name, such as auto, ps or sfb. {_AS_TRAINING}")
    ] = None,
    wire: Annotated[
        OptionalText, typer.Option(help=f"Poseidon's option of that name: fp32, bf16, fp16 or int8. {_AS_TRAINING}")
    ] = None,
    revise: Annotated[
        OptionalText,
        typer.Option(help=f"Poseidon's option of that name: auto (by time) or off (by bytes). {_AS_TRAINING}"),
    ] = None,
    coding: Annotated[
        OptionalText, typer.Option(help=f"Poseidon's option of that name: auto, on or off. {_AS_TRAINING}")
    ] = None,
    coded_share: Annotated[
        OptionalNumber,
        typer.Option(
            min=0.01,
            max=1,
            help="What travels of each byte that is coded. Default: as with real gradients of such layers.",
        ),
    ] = None,
    overlap: Annotated[bool, typer.Option("--overlap", help="With a DistributedOptimizer.")] = False,
) -> Described:
    spec = read_cluster(
        cluster,
        hosts=hosts,
        link=link,
        workers_per_host=workers_per_host,
        servers=servers,
        racks=racks,
        oversubscription=oversubscription,
    )
    exchange = _exchange(overlap, scheme=scheme, wire=wire, revise=revise, coding=coding)
    exchange = replace(exchange, coded_share=coded_share)
    table = read_model(model, arguments or [], device, batch, compute)  # last, because a script runs for it
    return Described(table, spec, exchange)


planning_command = shared_options(_described)
"""Gives `command(described, …)` these options. It gets what they describe, and its own options by name."""


def _exchange(overlap: bool, **flags: str | None) -> Exchange:
    """The exchange of training with the options of this environment, of which these flags beat some."""
    from poseidon.options import BY_NAME, resolve_option  # help does not wait for the compiled core
    from poseidon.planner import Exchange
    from poseidon.planner.layers import EXCHANGE_OPTIONS

    options = {name: resolve_option(name, os.environ) for name in (*EXCHANGE_OPTIONS, "scheme", "wire")}
    options |= {name: BY_NAME[name].read(text, BY_NAME[name].flag) for name, text in flags.items() if text is not None}
    return Exchange.of_options(options, options["scheme"], options["wire"], overlap)
