"""`poseidon top` and `poseidon metrics`: what the workers of a job do while they train."""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from poseidon.cli.optional import OptionalTexts
from poseidon.cli.output import JsonFlag, make_console, print_json, print_line
from poseidon.cli.server_admin import AdminTokenFile

if TYPE_CHECKING:
    from rich.console import RenderableType

    from poseidon.live import WorkerFigures

TOP_EPILOG = "Example: poseidon top"
METRICS_EPILOG = "Example: poseidon metrics --admin 7071"
_DEFAULT_ADMIN = "7071"
_SECONDS = 1.0  # between two looks
_NOBODY = "No worker of this user trains on this machine. Workers of other machines: poseidon top HOST:PORT …"


def top(
    addresses: Annotated[
        OptionalTexts,
        typer.Argument(help="Where `poseidon metrics` listens on other machines; default: this machine's workers."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the table once, as to a pipe.")] = False,
    admin_token_file: AdminTokenFile = None,
    json: JsonFlag = False,
) -> None:
    """Show each worker's step: its time, the stall, bytes by scheme, the slowest link, and who is late in which layer.

    It needs no option of the job. The figures are at most two seconds or one step old.
    """
    read = _reader(addresses or [], admin_token_file)
    console = make_console()
    if json:
        print_json([asdict(worker) for worker in read()])
        return
    from rich.console import Group
    from rich.live import Live

    from poseidon.watch import tables

    if once or not console.is_terminal:
        found = read()
        for table in tables(found):
            console.print(table)
        if not found:
            print_line(_NOBODY)
        return
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                shown: list[RenderableType] = [*tables(read())]
                live.update(Group(*(shown or [_NOBODY])), refresh=True)
                time.sleep(_SECONDS)
    except KeyboardInterrupt:
        pass


def metrics(
    admin: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where to listen: PORT on this machine or HOST:PORT.")
    ] = _DEFAULT_ADMIN,
    admin_token_file: AdminTokenFile = None,
) -> None:
    """Serve the figures of this machine's workers to Prometheus (/metrics) and to `poseidon top` (/workers)."""
    from poseidon.admin import Address, AdminServer, read_token
    from poseidon.live import read_boards
    from poseidon.watch import WatchService

    signals = queue.SimpleQueue[int]()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: signals.put(number))
    server = AdminServer(WatchService(read_boards), Address.parse(admin), read_token(admin_token_file))
    print_line(f"Serving http://{server.address}/metrics until Ctrl-C.")
    signals.get()
    server.close()


def _reader(addresses: Sequence[str], token_file: str | None) -> Callable[[], list[WorkerFigures]]:
    from poseidon.admin import Address, read_token
    from poseidon.live import read_boards
    from poseidon.watch import fetch

    if not addresses:
        return read_boards
    parsed, token = [Address.parse(text, "the address") for text in addresses], read_token(token_file)
    return lambda: fetch(parsed, token)
