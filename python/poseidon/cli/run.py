"""`poseidon run`: starts the workers of a training script, on this machine or on several."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from poseidon.cli.optional import OptionalText, OptionalTexts, OptionalWhole
from poseidon.errors import InvalidArgument

EPILOG = "Example: poseidon run -n 4 --link 100mbit --chunk-bytes 1MiB train.py --epochs 3"


def run(
    ctx: typer.Context,
    script: Annotated[str, typer.Argument(help="The Python script, or with -m the module, to run.")],
    arguments: Annotated[OptionalTexts, typer.Argument(help="Arguments of the script.")] = None,
    workers: Annotated[
        str,
        typer.Option(
            "--workers",
            "-n",
            metavar="N",
            help="How many workers to start; with --hosts MIN:MAX: begin with at least MIN, and take in more while it "
            "runs, as machines are added to the file of hosts.",
        ),
    ] = "1",
    link: Annotated[
        OptionalText,
        typer.Option(
            metavar="RATE",
            help="Put each worker on a host of its own, with a port shaped to this rate, such as 100mbit or 1gbit, "
            "behind a switch that serves urgent packets first. Needs root and iproute2.",
        ),
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")] = False,
    drop_in: Annotated[
        bool,
        typer.Option(
            "--drop-in",
            help="Put Poseidon's DistributedDataParallel in the place of torch's in SCRIPT and its modules.",
        ),
    ] = False,
    max_restarts: Annotated[
        OptionalWhole,
        typer.Option(
            min=0,
            help="With --on-failure rejoin or shrink: how often a worker that fails is started again; default: 3.",
        ),
    ] = None,
    master_port: Annotated[
        OptionalWhole, typer.Option(min=1, max=65535, help="Port of rank 0's rendezvous; default: a free one.")
    ] = None,
    hosts: Annotated[
        OptionalText,
        typer.Option(
            metavar="HOSTS",
            help="Run on these machines, by ssh: a,b,c:2, or a file with lines such as 'a slots=2'. Without a number "
            "one worker for each accelerator, and at least one.",
        ),
    ] = None,
    sync: Annotated[
        bool,
        typer.Option(
            "--sync", help="With --hosts: first copy the working directory there by rsync, without what git ignores."
        ),
    ] = False,
    replicas: Annotated[
        bool,
        typer.Option(
            "--replicas", help="With --hosts: each machine is one replica of a sharded model (docs/sharded.md)."
        ),
    ] = False,
    python: Annotated[
        OptionalText,
        typer.Option(metavar="PATH", help="With --hosts: Python on the machines; default: the path of this one."),
    ] = None,
    ssh: Annotated[
        OptionalText, typer.Option(metavar="COMMAND", help="With --hosts: ssh with options of your own; default: ssh.")
    ] = None,
    env: Annotated[
        OptionalTexts,
        typer.Option(
            metavar="NAME[=VALUE]",
            help="With --hosts: one more environment variable for the workers. Those of Poseidon, NCCL, torch and "
            "their like go along anyway.",
        ),
    ] = None,
) -> None:
    """Run a training script as N workers on this machine, or with --hosts on several.

    Rank 0 has the terminal; lines of the other ranks start with their number in brackets. If a worker fails the
    others are ended, and the exit status is that of the first that failed; with --on-failure rejoin or shrink it is
    started again instead. Options go before SCRIPT. Those of the named groups can also be given as POSEIDON_<NAME> or
    in poseidon.toml.
    """
    if not module and not Path(script).exists():
        raise InvalidArgument(f"there is no script {script}: give its path, or the name of a module with -m")
    source = ctx.get_parameter_source("workers")
    if hosts is None and source is not None and source.name == "DEFAULT":
        _refuse_a_number_after(script, arguments or [])
    runner = ["-m", "poseidon.torch.drop_in"] if drop_in else []
    program = [*runner, *(["-m"] if module else []), script, *(arguments or [])]
    if hosts is None:
        elsewhere = {"--sync": sync, "--replicas": replicas, "--python": python, "--ssh": ssh, "--env": env}
        if given := [name for name, value in elsewhere.items() if value]:
            raise InvalidArgument(f"{given[0]} is for other machines: give them with --hosts a,b,c:2")
        from poseidon.launch import run_workers  # help does not wait for the compiled core

        command = [sys.executable, *program]
        count = _number_of(workers)
        outcome = run_workers(command, count, link, options=ctx.obj, master_port=master_port, max_restarts=max_restarts)
        raise typer.Exit(outcome.exit_status)
    if link is not None:
        raise InvalidArgument("--link is for workers of this machine: leave one of --link and --hosts out")
    from poseidon.cluster.files import program_files
    from poseidon.cluster.hosts import parse_hosts
    from poseidon.cluster.launcher import Plan, run_on_hosts

    plan = Plan(
        parse_hosts(hosts),
        program,
        program_files(script, module),
        python=python or sys.executable,
        ssh=ssh or "ssh",
        copies=sync,
        environment=env or [],
        master_port=master_port,
        max_restarts=max_restarts,
        replicas=replicas,
        workers=None if source is None or source.name == "DEFAULT" else _range_of(workers),
        hosts_file=Path(hosts).absolute() if os.path.isfile(hosts) else None,
    )
    raise typer.Exit(run_on_hosts(plan, ctx.obj or {}).exit_status)


def _number_of(text: str) -> int:
    if re.fullmatch(r"\d+:\d+", text):
        raise InvalidArgument(f"-n {text} is for several machines: give them with --hosts; on this one -n N starts N")
    if not text.isdecimal() or int(text) < 1:
        raise InvalidArgument(f"the number of workers is {text!r}: it must be a whole number, 1 or more")
    return int(text)


def _range_of(text: str) -> tuple[int, int]:
    """MIN and MAX."""
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if found is None:
        raise InvalidArgument(
            "-n is the number of workers of one machine: with --hosts give them there, as a:2,b:2, or give a range as "
            "--workers 2:16"
        )
    least, most = int(found[1]), int(found[2])
    if not 1 <= least <= most:
        raise InvalidArgument(f"--workers {text}: the first number is 1 or more, and the second not less")
    return least, most


def _refuse_a_number_after(script: str, arguments: list[str]) -> None:
    """Raises InvalidArgument where the number of workers was meant for this command, but comes after the script."""
    for place, argument in enumerate(arguments):
        if argument == "--":
            return
        found = re.fullmatch(r"(?:-n|-np|--workers)(?:=?(\d+))?", argument)
        following = arguments[place + 1] if place + 1 < len(arguments) else ""
        number = found and (found[1] or (following if following.isdigit() else None))
        if number:
            given = argument if found and found[1] else f"{argument} {number}"
            raise InvalidArgument(
                f"'{given}' comes after the script, so it is the script's, and one worker would train alone: write "
                f"poseidon run -n {number} {script} …; if the script has such an option, write "
                f"poseidon run -n 1 {script} …"
            )
