"""The progress bar of a benchmark's rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


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
