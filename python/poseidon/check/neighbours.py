"""Whether others use this machine's processors now."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from poseidon.check.finding import Finding

_LOOK_S = 0.5
_BUSY_CORES = 0.25  # of all
_STOLEN = 0.05
_IDLE, _WAITING, _STEAL = 3, 4, 7  # columns of /proc/stat


def check_neighbours(seconds: float = _LOOK_S) -> Finding | None:
    """Looks for `seconds`, in which this process sleeps."""
    before, earlier = _processors(), _processes()
    time.sleep(seconds)
    spent = [late - early for late, early in zip(_processors(), before, strict=True)]
    total = max(1, sum(spent))
    cores = os.cpu_count() or 1
    stolen = spent[_STEAL] / total
    if stolen > _STOLEN:
        return Finding(
            "busy neighbour",
            f"the hypervisor gives {stolen:.0%} of this machine's processors to others",
            "top -b -n 1 | grep Cpu   # st; move to a machine of your own",
        )
    busy = 1 - (spent[_IDLE] + spent[_WAITING]) / total - stolen
    if busy < _BUSY_CORES:
        return None
    used = {pid: ticks - earlier.get(pid, ticks) for pid, ticks in _processes().items()}
    pid = max(used, key=lambda one: used[one])
    return Finding(
        "busy neighbour",
        f"other processes use {busy * cores:.1f} of {cores} cores, process {pid} ({_name(pid)}) most of all",
        f"ps -o pid,user,pcpu,args -p {pid}   # end it, or wait until it has ended",
    )


def _processors() -> list[int]:
    return [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]


def _processes() -> dict[int, int]:
    """Ticks that each process has run."""
    ticks = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            ticks[int(folder.name)] = int(fields[11]) + int(fields[12])
    return ticks


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return "ended"
