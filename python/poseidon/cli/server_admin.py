"""`poseidon server jobs`, `drain` and `evict`: what an operator asks the admin port of a running server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from poseidon.cli.optional import OptionalText, OptionalWhole
from poseidon.cli.output import JsonFlag, print_json, print_line, print_table

if TYPE_CHECKING:
    from poseidon.admin import AdminClient

Admin = Annotated[str, typer.Option(metavar="ADDRESS", help="The server's --admin: PORT on this machine or HOST:PORT.")]
AdminTokenFile = Annotated[
    OptionalText, typer.Option(metavar="FILE", help="The admin port's token; a port beyond this machine needs one.")
]
_DEFAULT_ADMIN = "7070"
_COLUMNS = (
    *("job", "secret", "state", "workers", "generation", "received", "sent", "memory", "limit", "open chunks"),
    *("here for", "silent for"),
)


def add_admin_commands(app: typer.Typer) -> None:
    """Puts the commands into the group `poseidon server`."""
    app.command("jobs", epilog="Example: poseidon server jobs --admin 127.0.0.1:7070 --json")(jobs)
    app.command("drain", epilog="Example: poseidon server drain --admin 127.0.0.1:7070")(drain)
    app.command("evict", epilog="Example: poseidon server evict my-job --admin 127.0.0.1:7070")(evict)


def jobs(admin: Admin = _DEFAULT_ADMIN, admin_token_file: AdminTokenFile = None, json: JsonFlag = False) -> None:
    """List the jobs of a running server: workers, traffic, memory, and for how long nothing has come."""
    report = _client(admin, admin_token_file).jobs()
    if json:
        print_json(report)
        return
    if report["jobs"]:
        print_table(_COLUMNS, [_row(job) for job in report["jobs"]])
    else:
        print_line("No jobs.")
    limit = _megabytes(report["memory_limit_bytes"])
    print_line(f"All jobs hold {_megabytes(report['memory_bytes'])} of {limit}.")
    if report["draining"]:
        print_line("The server is draining: it takes no new job, and ends when none is here or may come back.")


def drain(admin: Admin = _DEFAULT_ADMIN, admin_token_file: AdminTokenFile = None, json: JsonFlag = False) -> None:
    """Let a running server take no new job. The jobs that it has go on, and it ends with the last of them."""
    report = _client(admin, admin_token_file).drain()
    if json:
        print_json(report)
        return
    names = ", ".join(f"'{job['name']}'" for job in report["jobs"])
    left = f"It ends when these jobs have: {names}." if names else "No job is here: it ends, or waits for a lost one."
    print_line(f"The server takes no new job. {left}")


def evict(
    job: Annotated[str, typer.Argument(help="The job's name.")],
    secret: Annotated[
        OptionalWhole,
        typer.Option(help="Which of the server's secrets its workers know, from 1, if several have a job of the name."),
    ] = None,
    admin: Admin = _DEFAULT_ADMIN,
    admin_token_file: AdminTokenFile = None,
    json: JsonFlag = False,
) -> None:
    """End one job of a running server. Its workers fail and are told so; no other job notices."""
    answer = _client(admin, admin_token_file).evict(job, secret)
    if json:
        print_json(answer)
    else:
        print_line(f"Job '{job}' is evicted. It may come back when it is started again.")


def _client(admin: str, token_file: str | None) -> AdminClient:
    from poseidon.admin import Address, AdminClient, read_token

    return AdminClient(Address.parse(admin), read_token(token_file))


def _row(job: dict[str, Any]) -> tuple[object, ...]:
    return (
        escape(job["name"]),
        job["secret"] or "none",
        job["state"],
        f"{job['connected_count']} of {job['worker_count']}",
        job["generation"],
        _megabytes(job["bytes_received"]),
        _megabytes(job["bytes_sent"]),
        _megabytes(job["memory_bytes"]),
        _megabytes(job["memory_limit_bytes"]) if job["memory_limit_bytes"] else "none",
        job["open_chunk_count"],
        f"{job['age_s']:.0f} s",
        f"{job['silent_s']:.1f} s",
    )


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB"
