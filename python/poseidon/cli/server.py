"""`poseidon server`: a parameter server that stands alone, and what its operator asks it."""

from __future__ import annotations

import contextlib
import queue
import resource
import signal
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from poseidon.cli.output import JsonFlag, print_json, print_line
from poseidon.cli.server_admin import AdminTokenFile, add_admin_commands
from poseidon.cli.settings import ServerGroup
from poseidon.errors import InvalidArgument

if TYPE_CHECKING:
    from poseidon.admin import AdminServer
    from poseidon.options import Settings

EPILOG = "Example: poseidon server --port 7000 --admin 7070"
_MOST_CORES = 8  # of the default: as many saturate a machine's memory

app = typer.Typer(cls=ServerGroup, epilog=EPILOG)
add_admin_commands(app)


@app.callback(invoke_without_command=True)
def server(
    ctx: typer.Context,
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port of the first core, the others take the next ones; 0: free ports."),
    ] = 0,
    admin: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="A port for the operator, as PORT on this machine or HOST:PORT. Default: none."
        ),
    ] = "",
    admin_token_file: AdminTokenFile = None,
    json: JsonFlag = False,
) -> None:
    """Serve until Ctrl-C; give the printed address to the workers as --servers.

    It listens on this machine alone (127.0.0.1) unless --interfaces says where else, such as 10.0.0.1, eth0 or, for all
    addresses of the machine, 0.0.0.0. With a secret (--secret-file, or POSEIDON_SECRET) it takes only workers that know
    it; a file with several, one a line, makes tenants that do not notice each other. With --tls on what they exchange
    is encrypted; the workers need it, too. Options of the named groups can also be given as POSEIDON_<NAME> or in
    poseidon.toml.

    With --admin the commands below, and HTTP, say what the server's jobs do, drain the server and evict a job
    (docs/server.md).
    """
    if ctx.invoked_subcommand is not None:
        if ctx.obj or port or admin or admin_token_file or json:
            raise InvalidArgument(
                f"options before `{ctx.invoked_subcommand}` are of a server that starts: put those of the command "
                f"behind it, as in `poseidon server {ctx.invoked_subcommand} --admin 7070`"
            )
        return
    if admin_token_file and not admin:
        raise InvalidArgument("--admin-token-file is the token of an admin port: give --admin, too")
    # Help does not wait for the compiled core.
    from poseidon._core import Server
    from poseidon.admin import Address, AdminServer, AdminService, read_token
    from poseidon.launch.terminal import Terminal
    from poseidon.options import available_cpu_count, resolve_with

    settings = resolve_with(ctx.obj)
    if settings.sources["server_cores"] == "default":  # which leaves room for a framework: there is none here
        settings = settings.replace(server_cores=min(_MOST_CORES, available_cpu_count()))
    _, most_descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)  # every worker has several connections
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_descriptors, most_descriptors))
    signals = queue.SimpleQueue[int]()  # an Event would wait for itself if its own set() or wait() is interrupted
    stopped: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.append(number)
        signals.put(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    options = settings.core()
    options.secret = "\n".join(settings.secrets)
    listening = Server.listen(options, port)
    with contextlib.ExitStack() as stack:
        terminal = stack.enter_context(contextlib.closing(Terminal(lambda: bool(stopped))))
        stack.callback(listening.shutdown)
        admin_server = None
        if admin:
            admin_server = AdminServer(AdminService(listening), Address.parse(admin), read_token(admin_token_file))
            stack.callback(admin_server.close)
        _print_start(listening.address, settings, admin_server, json)
        told = 0
        while not _has_one_within(signals, 1.0) and not listening.drained():
            notices = listening.notices()
            for text in notices[told:]:
                terminal.tell(text, "poseidon server")
            told = len(notices)


def _print_start(address: str, settings: Settings, admin_server: AdminServer | None, as_json: bool) -> None:
    if as_json:
        admin = {} if admin_server is None else {"admin": str(admin_server.address)}
        print_json({"address": address, "secret_count": len(settings.secrets), **admin})
        return
    print_line(f"Serving at {address} until Ctrl-C.")
    print_line(f"Workers use it with:  poseidon run --servers {address} …")
    print_line(_who_is_let_in(settings))
    if admin_server is not None:
        print_line(f"Operators use it with:  poseidon server jobs --admin {admin_server.address}")


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
