"""What a worker that fails leaves for `poseidon run`, which says who failed first.

The first to fail is not the first to end: before it has shown its error and ended, the others may have learned of it
and have ended with errors of their own. So each worker notes when its failure began, and whether another one's was
the cause, in a file that the launcher has named.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from poseidon.errors import Aborted, PeerLost
from poseidon.options import failure_mark

_OWN, _OF_ANOTHER = "own", "of another"


def leave_mark(error: BaseException) -> None:
    """Notes that this process fails with `error`, unless it has noted a failure before. Does nothing if not asked to.

    Call it before any other process is told.
    """
    path = failure_mark()
    if path is not None:
        kind = _OF_ANOTHER if _stems_from_another(error) else _OWN
        # Where it cannot be written the launcher goes by when the workers end.
        with contextlib.suppress(OSError), open(path, "x", encoding="utf-8") as file:
            file.write(f"{time.monotonic_ns()} {kind}")


def mark_order(path: Path, ended_ns: int) -> tuple[bool, int]:
    """Whether another's failure was the cause, and when it began, by the monotonic clock: the least is the first.

    `ended_ns` is when the process was seen to have ended, which counts where it has left no mark.
    """
    with contextlib.suppress(OSError, ValueError):
        began_ns, _, kind = path.read_text(encoding="utf-8").partition(" ")
        return kind == _OF_ANOTHER, int(began_ns)
    return False, ended_ns


def _stems_from_another(error: BaseException | None) -> bool:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, (Aborted, PeerLost)):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
