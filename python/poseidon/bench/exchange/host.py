"""A process of `poseidon bench exchange`: a worker with infinitely fast compute."""

from __future__ import annotations

import ctypes
import re
import time
from dataclasses import dataclass
from pathlib import Path

from poseidon.bench.exchange.arrays import Arrays
from poseidon.bench.exchange.engine import BenchmarkJob
from poseidon.bench.exchange.engines import make_engine
from poseidon.bench.hosts.measures import cpu_seconds, interface_counters, retransmission_timeouts

LEAD_IN_STEPS = 1  # the first step after a pause finds slow connections and workers out of step


@dataclass(frozen=True)
class Round:
    """What one worker measured.

    `ends` has the monotonic time, in seconds, at the end of the lead-in and of each measured step. `cpu_seconds` is the
    user and system time of the process in these steps. Since before the workers met, the resident memory has grown by
    `grown_bytes` at the end, and by `peak_bytes` at most. Each port of the host has sent `port_sent_bytes` in these
    steps, headers included. The host's TCP has waited for `timeouts` timers to send lost packets again.
    """

    ends: list[float]
    cpu_seconds: float
    grown_bytes: int
    peak_bytes: int
    port_sent_bytes: list[int]
    timeouts: int


class ExchangeHost:
    """A worker: its arrays and its end of one method's exchange."""

    def __init__(self, job: BenchmarkJob, rank: int) -> None:
        self._worker_count = len(job.places)
        self._interfaces = job.places[rank].interfaces
        self._rank = rank
        self._arrays = Arrays(job.tensors)
        self._engine = make_engine(job, rank, self._arrays)

    def ready(self) -> None:
        """Does nothing. The call returns when the worker has been built."""

    def prepare(self, step_count: int) -> None:
        """Meets the other workers and exchanges known values `step_count` times. Raises PoseidonError if wrong."""
        ctypes.CDLL(None).malloc_trim(0)  # what is free must not hide growth
        self._memory_before = _memory_bytes("VmRSS")
        self._engine.connect()
        for step in range(step_count):
            self._arrays.fill(self._rank, step)
            self._engine.step()
            if self._engine.divisor:
                self._arrays.check(step, self._worker_count, self._engine.divisor)
        if self._engine.divisor == self._worker_count:
            self._arrays.draw(self._rank)
        else:
            self._arrays.clear()

    def measure(self, step_count: int) -> Round:
        """Exchanges step after step, without a pause between them."""
        Path("/proc/self/clear_refs").write_text("5")  # restarts VmHWM
        before, timeouts_before = cpu_seconds(), retransmission_timeouts()
        sent_before = self._sent_bytes()
        ends = []
        for _ in range(LEAD_IN_STEPS + step_count):
            self._engine.step()
            ends.append(time.monotonic())
        return Round(
            ends[LEAD_IN_STEPS - 1 :],
            cpu_seconds() - before,
            _memory_bytes("VmRSS") - self._memory_before,
            _memory_bytes("VmHWM") - self._memory_before,
            [after - before for after, before in zip(self._sent_bytes(), sent_before, strict=True)],
            retransmission_timeouts() - timeouts_before,
        )

    def close(self) -> None:
        """Ends the connections to the other workers."""
        self._engine.close()

    def _sent_bytes(self) -> list[int]:
        return [interface_counters(interface).sent for interface in self._interfaces]


def _memory_bytes(field: str) -> int:
    match = re.search(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    if match is None:
        raise RuntimeError(f"/proc/self/status has no {field}")
    return int(match[1]) << 10
