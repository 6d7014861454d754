"""`poseidon bench suite`: runs what is missing, and shows all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from poseidon.bench.suite.cells import append, load, measure, missing
from poseidon.bench.suite.grid import HOSTS, METHODS, MODELS, RATES, groups, methods_of
from poseidon.bench.suite.page import markdown, rows_of, write_page
from poseidon.cli.output import JsonFlag, print_json, print_line, print_table, written

EPILOG = "Example: poseidon bench suite --models VGG19,GPT-2 --rates 10 --hosts 4 --list"
_PAGE = "suite.html"


def _all(values: Iterable[str | float]) -> str:
    return ",".join(value if isinstance(value, str) else f"{value:g}" for value in values)


def suite(
    models: Annotated[str, typer.Option(help="Models, separated by commas.")] = _all(MODELS),
    rates: Annotated[str, typer.Option(help="Rates of ports in Gb/s that are stood for.")] = _all(RATES),
    hosts: Annotated[str, typer.Option(help="Numbers of hosts.")] = _all(HOSTS),
    methods: Annotated[str, typer.Option(help="Methods, as of `poseidon bench train`.")] = _all(METHODS),
    slower: Annotated[
        float, typer.Option(min=1.0, help="Stretches time so many times more, on a machine whose cores are all busy.")
    ] = 1.0,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where results are kept, and go on from.")] = Path("suite"),
    list_only: Annotated[bool, typer.Option("--list", help="Say what would be run and how long; run nothing.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown; run nothing.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Measures models at rates on hosts by Poseidon and by torch's DDP, and writes a page (docs/benchmarks.md).

    Each group of cells runs in network namespaces with plain queues and the system's TCP, its methods in turn. Each is
    kept in DIR as soon as it is there, and a run that was cut off goes on. Needs root. All of it takes some hours.
    """
    chosen, compared = groups(models, rates, hosts, slower), methods_of(methods)
    cells = load(out)
    if as_markdown:
        print_line(markdown(cells))
        return
    left = [group for group in chosen if missing(group, compared, cells)]
    if list_only:
        rows = [(str(group), f"{group.stretch:.3g}", f"{group.seconds(compared):.0f} s") for group in left]
        print_table(("group", "stretch", "about"), rows)
        minutes = sum(group.seconds(compared) for group in left) / 60
        print_line(f"{len(left)} groups of {len(compared)} methods are left, about {minutes:.0f} minutes.")
        return
    with written("--out", out):  # before hours of measuring
        out.mkdir(parents=True, exist_ok=True)
    for number, group in enumerate(left, 1):
        print_line(f"{number} of {len(left)}: {group}, about {group.seconds(compared):.0f} s")
        append(out, measure(group, compared))
    cells = load(out)
    write_page(cells, out / _PAGE)
    if as_json:
        print_json([asdict(row) for row in rows_of(cells)])
    else:
        print_line(f"{len(cells)} cells: {out / _PAGE}")
