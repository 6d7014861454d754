"""`poseidon checkpoint`: what servers have saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from poseidon.cli.output import JsonFlag, print_json, print_table

if TYPE_CHECKING:
    from poseidon._core import CheckpointListing

app = typer.Typer(
    no_args_is_help=True,
    help="What parameter servers have saved in their checkpoint_dir.",
    epilog="Example: poseidon checkpoint list /shared/checkpoints",
)

Directory = Annotated[str, typer.Argument(help="The servers' checkpoint_dir.")]


@app.command("list", epilog="Example: poseidon checkpoint list /shared/checkpoints --json")
def list_versions(directory: Directory, json: JsonFlag = False) -> None:
    """List the versions of every job, the newest first, by what their files say of themselves."""
    _print(_listings(directory, verify=False), json)


@app.command(epilog="Example: poseidon checkpoint check /shared/checkpoints")
def check(directory: Directory, json: JsonFlag = False) -> None:
    """Read every byte and compare checksums. Exit status 1 where a job has versions and none can be used."""
    listings = _listings(directory, verify=True)
    _print(listings, json)
    usable = {listing.job for listing in listings if listing.complete}
    if any(listing.job not in usable for listing in listings):
        raise typer.Exit(1)


def _listings(directory: str, verify: bool) -> list[CheckpointListing]:
    from poseidon._core import list_checkpoints

    return list_checkpoints(directory, verify)


def _print(listings: list[CheckpointListing], as_json: bool) -> None:
    if as_json:
        print_json(
            [
                {
                    "job": listing.job,
                    "version": listing.version,
                    "run": f"{listing.run:016x}",
                    "files": listing.file_count,
                    "layers": listing.unit_count,
                    "bytes": listing.size_bytes,
                    "usable": listing.complete,
                    "problem": listing.problem,
                }
                for listing in listings
            ]
        )
        return
    rows = [
        (one.job, one.version, one.file_count, one.unit_count, f"{one.size_bytes / 1e6:.1f}", one.problem or "usable")
        for one in listings
    ]
    print_table(("job", "version (step)", "files", "layers", "MB", "state"), rows)
