"""How commands print: tables for people, JSON for machines, errors in one line."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from poseidon.errors import InvalidArgument

_PIPE_WIDTH = 160
_LONGEST_NAME = 36  # of a first column that leaves room for others


class Result(Protocol):
    """What a benchmark reports."""

    def to_json(self) -> dict[str, Any]: ...


JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def print_json(data: Any) -> None:
    """Prints `data` as one JSON document."""
    print(json.dumps(data, indent=2), flush=True)


@contextmanager
def written(option: str, path: Path) -> Iterator[None]:
    """While what an option names is written. InvalidArgument says so if it cannot be."""
    try:
        yield
    except OSError as error:
        raise InvalidArgument(f"{option} {path} cannot be written: {error.strerror}") from None


def check_writable(option: str, path: Path) -> None:
    """Raises InvalidArgument if the file that an option names cannot be written. Call it before what takes long."""
    is_new = not path.exists()
    with written(option, path):
        path.open("a").close()
        if is_new:
            path.unlink()


def make_console() -> Console:
    """The terminal. A pipe or file gets lines wide enough for every table, unless COLUMNS says how wide."""
    console = Console()
    return console if console.is_terminal or os.environ.get("COLUMNS") else Console(width=_PIPE_WIDTH)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints rows under their column names."""
    # Without lines between columns there is room in the 80 columns of a terminal.
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    names = max((len(str(row[0])) for row in rows), default=0)
    for number, column in enumerate(columns):
        # A name that is cut off cannot be used, and one in two lines not be searched.
        table.add_column(column, overflow="fold", no_wrap=number == 0 and names <= _LONGEST_NAME)
    for row in rows:
        table.add_row(*map(str, row))
    make_console().print(table)


def result_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], words: Collection[str] = ("method",)
) -> Table:
    """A table of figures, which stand to the right of their columns, and of `words`, which stand to the left."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in words else "right")
    for row in rows:
        table.add_row(*row)
    return table


def print_results(results: Sequence[Result], as_json: bool, render: Callable[[Any], Iterable[RenderableType]]) -> None:
    """Prints a benchmark's results: as one JSON list, or what `render` makes of each."""
    if as_json:
        print_json([result.to_json() for result in results])
        return
    console = make_console()
    for result in results:
        for part in render(result):
            console.print(part)


def print_line(text: str) -> None:
    """Prints a sentence as it is, without markup or wrapping."""
    Console(soft_wrap=True).print(text, markup=False, highlight=False)


def wrapped(text: str) -> str:
    """A paragraph, or an item of a list, of a page of Markdown."""
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) + "\n"
