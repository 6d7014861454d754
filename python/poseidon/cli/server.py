"""`poseidon server`: a parameter server that stands alone."""

from __future__ import annotations

import contextlib
import queue
import resource
import signal
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from poseidon.cli.output import JsonFlag, print_json, print_line

if TYPE_CHECKING:
    from poseidon.options import Settings

EPILOG = "Example: poseidon server --interfaces 10.0.0.1 --port 7000"
_MOST_CORES = 8  # of the default: as many saturate a machine's memory


def server(
    ctx: typer.Context,
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port of the first core, the others take the next ones; 0: free ports."),
    ] = 0,
    json: JsonFlag = False,
) -> None:
    """Serve until Ctrl-C; give the printed address to the workers as --servers.

    It listens on this machine alone (127.0.0.1) unless --interfaces says where else, such as 10.0.0.1, eth0 or, for all
    addresses of the machine, 0.0.0.0. With a secret (--secret-file, or POSEIDON_SECRET) it takes only workers that know
    it; a file with several, one a line, makes tenants that do not notice each other. With --tls on what they exchange
    is encrypted; the workers need it, too. Options of the named groups can also be given as POSEIDON_<NAME> or in
    poseidon.toml.
    """
    # Help does not wait for the compiled core.
    from poseidon._core import Server
    from poseidon.options import available_cpu_count, resolve_with

    settings = resolve_with(ctx.obj)
    if settings.sources["server_cores"] == "default":  # which leaves room for a framework: there is none here
        settings = settings.replace(server_cores=min(_MOST_CORES, available_cpu_count()))
    _, most_descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)  # every worker has several connections
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_descriptors, most_descriptors))
    signals = queue.SimpleQueue[int]()  # an Event would wait for itself if its own set() or wait() is interrupted
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: signals.put(number))
    options = settings.core()
    options.secret = "\n".join(settings.secrets)
    listening = Server.listen(options, port)
    try:
        if json:
            print_json({"address": listening.address, "secret_count": len(settings.secrets)})
        else:
            print_line(f"Serving at {listening.address} until Ctrl-C.")
            print_line(f"Workers use it with:  poseidon run --servers {listening.address} …")
            print_line(_who_is_let_in(settings))
        told = 0
        while not _has_one_within(signals, 1.0):
            notices = listening.notices()
            for text in notices[told:]:
                print(f"poseidon server: {text}", file=sys.stderr, flush=True)
            told = len(notices)
    finally:
        listening.shutdown()


def _has_one_within(signals: queue.SimpleQueue[int], seconds: float) -> bool:
    with contextlib.suppress(queue.Empty):
        signals.get(timeout=seconds)
        return True
    return False


def _who_is_let_in(settings: Settings) -> str:
    if not settings.secrets:
        where = "on this machine " if not settings.interfaces else ""
        return f"It has no secret: whoever {where}can connect is let in. See --secret-file."
    if len(settings.secrets) == 1:
        return "It takes workers that know its secret: give them the same --secret-file or POSEIDON_SECRET."
    return f"It takes workers that know one of its {len(settings.secrets)} secrets, each in a --secret-file of its own."
