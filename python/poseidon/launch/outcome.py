"""How a run of workers ends, and what happens if a worker fails."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from poseidon.errors import InvalidArgument

_MOST_RESTARTS = 3  # of each worker, unless told otherwise


@dataclass(frozen=True)
class Failure:
    """A worker that failed. `code` is negative for a signal, as in subprocess.

    `host`: its machine, where a run has several. `lost`: the connection to it, so that nobody knows how it ended.
    """

    rank: int
    code: int
    host: str = ""
    lost: bool = False

    @property
    def exit_status(self) -> int:
        """The exit status that a shell would report for that worker."""
        return self.code if self.code > 0 else 128 - self.code

    @property
    def how(self) -> str:
        """How the worker ended, in words, e.g. "with exit code 3"."""
        if self.lost:
            return f"as the connection to {self.host} was lost"
        if self.code > 0:
            return f"with exit code {self.code}"
        try:
            return f"killed by {signal.Signals(-self.code).name}"
        except ValueError:  # one without a name, as most of real time
            return f"killed by signal {-self.code}"

    @property
    def who(self) -> str:
        """The rank, and its machine where there are several."""
        return f"rank {self.rank} on {self.host}" if self.host else f"rank {self.rank}"

    def __str__(self) -> str:
        return f"{self.who} failed first, {self.how}"


@dataclass
class Outcome:
    """How a run ended: the exit code of each rank's last process and how often it was started again, the first failure
    that ended the run, the ranks that had to be ended, and the signal (0: none) that stopped the launcher.

    `last_errors` has the last line that is not empty on each rank's standard error, as far as the launcher has passed
    it on. It does not for rank 0 where `rank_zero_has_terminal`.
    """

    codes: list[int] = field(default_factory=list)
    restart_counts: list[int] = field(default_factory=list)
    first_failure: Failure | None = None
    ended_ranks: list[int] = field(default_factory=list)
    interrupted_by: int = 0
    last_errors: dict[int, str] = field(default_factory=dict, compare=False)
    rank_zero_has_terminal: bool = field(default=False, compare=False)

    @property
    def exit_status(self) -> int:
        """The exit status of the launcher: 0, that of the first failure, or 128 + signal."""
        if self.interrupted_by:
            return 128 + self.interrupted_by
        return self.first_failure.exit_status if self.first_failure else 0


@dataclass(frozen=True)
class Recovery:
    """What happens if a worker fails: how often it is started again, and whether the others go on without it.

    `together`: the workers are one replica of a sharded model. Then all are started again.
    """

    most_restarts: int = 0
    spares_workers: bool = False
    together: bool = False

    @classmethod
    def of(cls, on_failure: str, max_restarts: int | None, together: bool = False) -> Recovery:
        """The behaviour for the option on_failure and the number of restarts (None: 3). Raises InvalidArgument."""
        if on_failure == "abort":
            if max_restarts:
                raise InvalidArgument("workers are only started again with --on-failure rejoin or shrink: add it")
            return cls()
        most = _MOST_RESTARTS if max_restarts is None else max_restarts
        if most < 0:
            raise InvalidArgument(f"the number of restarts is {most}: it must be 0 or more")
        return cls(most, on_failure == "shrink" and not together, together)
