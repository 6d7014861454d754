"""All that an agent's workers have started, also what has left their process groups, as by `setsid`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_MOST_ROUNDS = 20  # while what is being ended starts more


def adopt_orphans() -> None:
    """From now on a process whose parent ends becomes a child of this one, if it descends from it."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_descendants(spared: int | None) -> None:
    """Kills all descendants of this process but one."""
    for _ in range(_MOST_ROUNDS):
        found = [pid for pid in _descendants(os.getpid()) if pid != spared]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            for pid in found:
                os.waitpid(pid, 0)


def _descendants(parent: int) -> list[int]:
    """Those that have not ended."""
    children: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        for tasks in Path(f"/proc/{parent}/task").glob("*/children"):
            children += map(int, tasks.read_text().split())
    alive = [pid for pid in children if _runs(pid)]
    return [*alive, *(one for pid in children for one in _descendants(pid))]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return False
