"""`poseidon server`: a parameter server that stands alone."""

from __future__ import annotations

import signal
import threading
from typing import Annotated

import typer

from poseidon.cli.output import JsonFlag, print_json, print_line
from poseidon.cli.settings import with_options
from poseidon.options import resolve_with


@with_options("interface", "compute_threads", "timeout")
def server(
    command_line: dict[str, str],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 0,
    json: JsonFlag = False,
) -> None:
    """Serve until Ctrl-C; give the printed address to the workers as --servers."""
    settings = resolve_with(command_line)
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
