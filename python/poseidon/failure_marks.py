"""Marks that failing workers leave for `poseidon run`, so that it can say which worker failed first.

The worker that fails first need not end first. While it still prints its error, the others may learn of the failure
and end with their own errors. So each worker writes to a file that the launcher has named: when its failure began,
and whether the failure of another worker was the cause, or an operator has evicted the job.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from poseidon.errors import Aborted, Evicted, PeerLost
from poseidon.options import failure_mark

_OWN, _OF_ANOTHER, _EVICTED = "own", "of another", "evicted"


def leave_mark(error: BaseException) -> None:
    """Notes that this process fails with `error`, unless it has noted a failure before.

    Does nothing if the launcher has named no file. Call it before any other process is told.
    """
    path = failure_mark()
    if path is not None:
        kind = (
            _EVICTED if _stems_from(error, Evicted) else _OF_ANOTHER if _stems_from(error, Aborted, PeerLost) else _OWN
        )
        # Where it cannot be written the launcher goes by when the workers end.
        with contextlib.suppress(OSError), open(path, "x", encoding="utf-8") as file:
            file.write(f"{time.monotonic_ns()} {kind}")


def mark_order(path: Path, ended_ns: int) -> tuple[bool, int]:
    """A key that sorts failures: whether another worker's failure was the cause, and when it began (monotonic clock).

    The smallest key is the first failure. `ended_ns` is the time at which the launcher saw the process end; it counts
    if the process has left no mark.
    """
    with contextlib.suppress(OSError, ValueError):
        began_ns, _, kind = path.read_text(encoding="utf-8").partition(" ")
        return kind == _OF_ANOTHER, int(began_ns)
    return False, ended_ns


def tells_of_eviction(path: Path) -> bool:
    """Whether the worker has failed because an operator has evicted its job."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8").endswith(f" {_EVICTED}")
    return False


def _stems_from(error: BaseException | None, *kinds: type[BaseException]) -> bool:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, kinds):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
