"""What uses this machine's processors, and whether others do now."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from poseidon.check.finding import Finding

_IDLE, _WAITING, _STEAL = 3, 4, 7  # columns of /proc/stat; waiting is for disks


@dataclass(frozen=True)
class ProcessorTime:
    """Ticks of all cores together."""

    whole: int
    idle: int
    stolen: int  # by a hypervisor, for other machines

    @classmethod
    def now(cls) -> ProcessorTime:
        """Up to now."""
        ticks = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return cls(sum(ticks), ticks[_IDLE] + ticks[_WAITING], ticks[_STEAL])

    def since(self, earlier: ProcessorTime) -> ProcessorTime:
        """What came after `earlier`."""
        return ProcessorTime(self.whole - earlier.whole, self.idle - earlier.idle, self.stolen - earlier.stolen)

    @property
    def stolen_share(self) -> float:
        """From 0 to 1."""
        return self.stolen / max(1, self.whole)

    @property
    def busy_share(self) -> float:
        """From 0 to 1: what ran here, and what was stolen."""
        return 1 - self.idle / max(1, self.whole)


_LOOK_S = 0.5
_BUSY_CORES = 0.25  # of all
_STOLEN = 0.05


def check_neighbours(seconds: float = _LOOK_S) -> Finding | None:
    """Looks for `seconds`, in which this process sleeps."""
    before, earlier = ProcessorTime.now(), _processes()
    time.sleep(seconds)
    spent = ProcessorTime.now().since(before)
    cores = os.cpu_count() or 1
    if spent.stolen_share > _STOLEN:
        return Finding(
            "busy neighbour",
            f"the hypervisor gives {spent.stolen_share:.0%} of this machine's processors to others",
            "top -b -n 1 | grep Cpu   # st; move to a machine of your own",
        )
    busy = spent.busy_share - spent.stolen_share
    if busy < _BUSY_CORES:
        return None
    used = {pid: ticks - earlier.get(pid, ticks) for pid, ticks in _processes().items()}
    pid = max(used, key=lambda one: used[one])
    return Finding(
        "busy neighbour",
        f"other processes use {busy * cores:.1f} of {cores} cores, process {pid} ({_name(pid)}) most of all",
        f"ps -o pid,user,pcpu,args -p {pid}   # end it, or wait until it has ended",
    )


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
