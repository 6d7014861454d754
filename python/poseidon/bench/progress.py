"""The progress bar of a benchmark's rounds, and runs that have one each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from poseidon.cli.output import check_writable, written

_Config = TypeVar("_Config")
_Result = TypeVar("_Result")


@contextmanager
def round_progress(name: str) -> Iterator[Callable[[str, int, int], None]]:
    """Gives a function to call before every round with (method, rounds done, rounds in all); full at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # The bar must not draw before the worker processes are forked: it has a thread.
    progress = Progress(*columns, console=Console(stderr=True), auto_refresh=False)
    task = progress.add_task(name, total=None)

    def show(method: str, done: int, total: int) -> None:
        progress.update(task, description=f"{name} {method}", completed=done, total=total)
        progress.refresh()

    with progress:
        yield show
        total = progress.tasks[task].total
        if total is not None:
            show("done", int(total), int(total))


def run_all(
    configs: Iterable[_Config],
    name_of: Callable[[_Config], str],
    run: Callable[[_Config, Callable[[str, int, int], None]], _Result],
    plot: Path | None,
    draw: Callable[[Sequence[_Result]], str],
) -> list[_Result]:
    """Runs each with a progress bar of its name, and draws all results to the file of the option --plot, if given.

    Raises InvalidArgument, before the first run, if that file cannot be written.
    """
    if plot is not None:
        check_writable("--plot", plot)
    results = []
    for config in configs:
        with round_progress(name_of(config)) as show:
            results.append(run(config, show))
    if plot is not None:
        with written("--plot", plot):
            plot.write_text(draw(results), encoding="utf-8")
    return results
