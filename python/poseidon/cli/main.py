"""Puts the commands together and turns errors into one line and an exit status."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Annotated

import typer

from poseidon.cli import (
    checkpoint,
    doctor,
    features,
    options,
    plan,
    racks,
    run,
    server,
    simulate,
    testbed,
    watch,
    what_if,
)
from poseidon.cli.lazy import lazy_group
from poseidon.cli.output import JsonFlag, print_json, print_table
from poseidon.cli.settings import RunCommand
from poseidon.errors import PoseidonError
from poseidon.version import VERSION

_PACKAGES = ("torch", "numpy")


def _version(json: JsonFlag = False) -> None:
    """Print the versions of Poseidon and of what it works with."""
    versions = {"poseidon": VERSION}
    versions |= {package: _version_of(package) for package in _PACKAGES}
    versions |= {"python": platform.python_version(), "system": f"{platform.system()} {platform.release()}"}
    if json:
        print_json(versions)
    else:
        print_table(["part", "version"], list(versions.items()))


def _version_of(package: str) -> str:
    try:
        return installed_version(package)
    except PackageNotFoundError:
        return "not installed"


app = typer.Typer(
    name="poseidon",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    epilog="Example: poseidon run -n 4 train.py",
)


@app.callback(invoke_without_command=True)
def poseidon(
    version: Annotated[
        bool, typer.Option("--version", "-V", is_eager=True, help="Print Poseidon's version and exit.")
    ] = False,
) -> None:
    """Synchronous data-parallel training on ordinary networks."""
    if version:
        print(f"poseidon {VERSION}")
        raise typer.Exit()


app.command("run", cls=RunCommand, epilog=run.EPILOG, context_settings={"allow_interspersed_args": False})(run.run)
app.add_typer(testbed.app, name="testbed")
app.add_typer(server.app, name="server")
app.command("plan", epilog=plan.EPILOG)(plan.plan)
app.command("racks", epilog=racks.EPILOG)(racks.racks)
app.command("simulate", epilog=simulate.EPILOG)(simulate.simulate)
app.command("what-if", epilog=what_if.WHAT_IF_EPILOG)(what_if.what_if)
app.command("report", epilog=what_if.REPORT_EPILOG)(what_if.report)
app.command("top", epilog=watch.TOP_EPILOG)(watch.top)
app.command("metrics", epilog=watch.METRICS_EPILOG)(watch.metrics)
app.command("options", epilog=options.EPILOG)(options.options)
app.command("features", epilog=features.EPILOG)(features.features)
app.add_typer(
    typer.Typer(),
    name="bench",
    cls=lazy_group("poseidon.bench.cli"),
    no_args_is_help=True,
    help="Benchmarks of exchange and training, against peers in the same run.",
    epilog="Example: poseidon bench train --help",
)
app.add_typer(checkpoint.app, name="checkpoint")
app.command("doctor", epilog=doctor.EPILOG)(doctor.doctor)
app.command("version", epilog="Example: poseidon version --json")(_version)


def main() -> None:
    """Entry point of the `poseidon` command. An error of Poseidon is one line on standard error and status 1."""
    try:
        app()
    except PoseidonError as error:
        print(f"poseidon: {error}", file=sys.stderr)
        sys.exit(1)
