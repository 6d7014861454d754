"""`poseidon server`: a parameter server that stands alone."""

from __future__ import annotations

import dataclasses
import signal
import threading
from typing import Annotated

import typer

from poseidon.cli.output import JsonFlag, print_json, print_line
from poseidon.cli.settings import with_options
from poseidon.options import available_cpu_count, resolve_with

_MOST_CORES = 8  # of the default: as many saturate a machine's memory


@with_options(
    "interfaces",
    "server_cores",
    "aggregation",
    "reduce_order",
    "assignment",
    "priority_classes",
    "dscp",
    "compute_threads",
    "timeout",
)
def server(
    command_line: dict[str, str],
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port of the first core, the others take the next ones; 0: free ports."),
    ] = 0,
    json: JsonFlag = False,
) -> None:
    """Serve until Ctrl-C; give the printed address to the workers as --servers."""
    settings = resolve_with(command_line)
    if settings.sources["server_cores"] == "default":  # which leaves room for a framework: there is none here
        settings = dataclasses.replace(settings, server_cores=min(_MOST_CORES, available_cpu_count()))
    from poseidon._core import Server

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    listening = Server.listen(settings.core(), port)
    try:
        if json:
            print_json({"address": listening.address})
        else:
            print_line(f"Serving at {listening.address} until Ctrl-C.")
            print_line(f"Workers use it with:  poseidon run --servers {listening.address} …")
        while not stop.wait(1.0):
            pass
    finally:
        listening.shutdown()
