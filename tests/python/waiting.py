"""How tests wait: for what they see happen, and no longer than a deadline.

Only here may a test sleep. Where it must elsewhere, a comment on the line says why (tools/structure/seam.py).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

# How many times longer than alone on a machine a test may take: some run at a low priority (tools/tests.sh).
SLOWED = float(os.environ.get("TEST_PATIENCE", "1"))
PATIENCE_S = 60.0  # so long that only a fault takes longer, however slow the machine is

# The first lines of a program that a test writes.
IN_PROGRAMS = f"""\
import sys
sys.path.append({str(Path(__file__).parent)!r})
from waiting import compute_for, happens, runs, stay, wait_for, wait_until
"""


def happens(condition: Callable[[], T], seconds: float, every: float = 0.01) -> T:
    """Waits until `condition()` is true, or `seconds` have passed, and returns what it gave last."""
    deadline = time.monotonic() + seconds
    while not (given := condition()) and time.monotonic() < deadline:
        time.sleep(every)
    return given


def wait_until(
    condition: Callable[[], T], what: str | Callable[[], str], seconds: float = PATIENCE_S, every: float = 0.01
) -> T:
    """Waits until `condition()` is true and returns what it gave. AssertionError that names `what` was waited for."""
    given = happens(condition, seconds, every)
    assert given, f"{seconds} s were not enough for {what if isinstance(what, str) else what()}"
    return given


def wait_for(*paths: Path) -> None:
    """Waits until these files exist, which others touch to say how far they are."""
    wait_until(lambda: all(path.exists() for path in paths), lambda: f"{[p.name for p in paths if not p.exists()]}")


def meet(folder: Path, rank: int, size: int) -> None:
    """Waits until all ranks are here. The job under test has no part in it. Each place has a folder of its own."""
    (folder / f"here-{rank}").touch()
    wait_for(*(folder / f"here-{other}" for other in range(size)))


def steady(read: Callable[[], T], pause: float) -> T:
    """What `read()` gives twice in a row, with a pause in s between."""
    seen = [read()]

    def has_settled() -> bool:
        seen.append(read())
        return seen[-1] == seen[-2]

    time.sleep(pause)
    wait_until(has_settled, lambda: f"{seen[-2]} to stay, it is {seen[-1]} now", every=pause)
    return seen[-1]


def runs(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def end(*processes: Any) -> None:
    """Kills processes, of `subprocess` or `multiprocessing`, and waits until they are gone and hold no port."""
    for process in processes:
        process.kill()
    for process in processes:
        gone = process.wait if hasattr(process, "wait") else process.join
        gone()


def compute_for(seconds: float) -> None:
    """Stands for whatever takes a worker so long: its computing, its data, or a machine that is slow."""
    time.sleep(seconds)


def stay(seconds: int = 60) -> None:
    """Does nothing until somebody ends this process. A process that all have forgotten ends itself after a while."""
    signal.alarm(seconds)
    while True:
        signal.pause()
