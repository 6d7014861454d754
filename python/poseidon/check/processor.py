"""What this machine's processors have done since it started, as Linux counts it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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
