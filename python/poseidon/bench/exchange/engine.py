"""What every engine of the exchange benchmark offers: how one host takes part in an exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from poseidon.bench.exchange.arrays import Arrays
from poseidon.bench.exchange.methods import ExchangeMethod
from poseidon.bench.hosts.fleet import Place


@dataclass(frozen=True)
class BenchmarkJob:
    """What every worker of a round is told.

    `places` are the workers' hosts, by rank. `ports` has a free port on each of them. `servers` has the "host:port" of
    each dedicated server. A plain copy sends `copy_bytes` in a step.
    """

    method: ExchangeMethod
    tensors: tuple[tuple[str, int], ...]
    places: Sequence[Place]
    ports: Sequence[int]
    copy_bytes: int
    timeout_seconds: float
    servers: tuple[str, ...] = ()


class Engine:
    """One worker's end of an exchange. A step turns the arrays of all workers into their sum over `divisor`.

    The divisor is 0 for an engine that leaves the arrays alone.
    """

    divisor = 1

    def __init__(self, job: BenchmarkJob, rank: int, arrays: Arrays) -> None:
        self._job, self._rank, self._arrays = job, rank, arrays

    def connect(self) -> None:
        """Meets the other workers."""

    def step(self) -> None:
        """Exchanges all arrays. The exchange is complete when this returns."""

    def close(self) -> None:
        """Ends the connections."""
