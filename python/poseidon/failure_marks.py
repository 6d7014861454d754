"""Marks that failing workers leave for `poseidon run`, so that it can say which worker failed first.

The worker that fails first need not end first. While it still prints its error, the others may learn of the failure
and end with their own errors. So each worker writes to a file that the launcher has named: when its failure began,
and whether the cause was the failure of another worker, the network, the program's own misuse of the library, or an
operator who has evicted the job. Its text follows, so that the launcher's last line is the cause.

Two more files say that the worker is a member of its job, and that it has left the job in order: with that the run has
ended, and a worker that fails later needs no replacement.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from poseidon.errors import Aborted, Evicted, InvalidArgument, PeerLost, PoseidonTimeout, Unreachable
from poseidon.options import failure_mark

_OWN, _OF_ANOTHER, _EVICTED, _NETWORK, _MISUSE = "own", "of another", "evicted", "network", "misuse"
_KINDS = (_OWN, _OF_ANOTHER, _EVICTED, _NETWORK, _MISUSE)
_MEMBER, _ENDED = ".member", ".ended"  # appended to the name of the file for failures
_MOST_TEXT = 2000


def leave_mark(error: BaseException) -> None:
    """Notes that this process fails with `error`, unless it has noted a failure before.

    Does nothing if the launcher has named no file. Call it before any other process is told.
    """
    path = failure_mark()
    if path is not None:
        kind = _kind_of(error)
        text = f"{type(error).__name__}: {error}".removesuffix(": ")[:_MOST_TEXT]
        # Where it cannot be written the launcher goes by when the workers end.
        with contextlib.suppress(OSError), open(path, "x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{time.monotonic_ns()} {kind}\n{text}")


def _kind_of(error: BaseException) -> str:
    if _stems_from(error, Evicted):
        return _EVICTED
    if is_of_another(error):
        return _OF_ANOTHER
    if isinstance(error, InvalidArgument):
        return _MISUSE
    return _NETWORK if _stems_from(error, PoseidonTimeout, Unreachable) else _OWN


def is_of_another(error: BaseException) -> bool:
    """Whether the failure of another worker is the cause of this one's."""
    return _stems_from(error, Aborted, PeerLost)


def note_membership() -> None:
    """Notes that this process is a member of its job now."""
    _touch(_MEMBER)
    path = failure_mark()
    if path is not None:
        with contextlib.suppress(OSError):
            Path(path + _ENDED).unlink(missing_ok=True)


def note_end() -> None:
    """Notes that this process leaves its job in order, because the run has ended."""
    _touch(_ENDED)


def mark_order(path: Path, ended_ns: int) -> tuple[bool, int]:
    """A key that sorts failures: whether another worker's failure was the cause, and when it began (monotonic clock).

    The smallest key is the first failure. `ended_ns` is the time at which the launcher saw the process end; it counts
    if the process has left no mark.
    """
    head, _ = _read(path)
    with contextlib.suppress(ValueError):
        began_ns, _, kind = head.partition(" ")
        return kind == _OF_ANOTHER, int(began_ns)
    return False, ended_ns


def text_of(path: Path) -> str:
    """The error that the worker has failed with, in one line; empty if it has left no mark."""
    return " ".join(_read(path)[1].split())


def tells_of_eviction(path: Path) -> bool:
    """Whether the worker has failed because an operator has evicted its job."""
    return _read(path)[0].endswith(f" {_EVICTED}")


def tells_of_misuse(path: Path) -> bool:
    """Whether the worker has failed because its program asks for what cannot be: it would do so again."""
    return _read(path)[0].endswith(f" {_MISUSE}")


def tells_of_network(path: Path) -> bool:
    """Whether the worker has failed because it did not reach others, which may succeed the next time."""
    return _read(path)[0].endswith((f" {_NETWORK}", f" {_OF_ANOTHER}"))


def is_member(path: Path) -> bool:
    """Whether the worker, whose file for failures this is, has become a member of its job."""
    return Path(f"{path}{_MEMBER}").exists()


def tells_of_end(path: Path) -> bool:
    """Whether the worker has left its job in order, so that the run has ended."""
    return Path(f"{path}{_ENDED}").exists()


def as_fields(path: Path) -> dict[str, Any]:
    """All that a worker has noted, for a launcher on another machine, whose clock is another."""
    fields: dict[str, Any] = {"member": is_member(path), "ended": tells_of_end(path)}
    head, text = _read(path)
    with contextlib.suppress(ValueError):
        began_ns, _, kind = head.partition(" ")
        fields |= {"age_ns": time.monotonic_ns() - int(began_ns), "kind": kind, "text": text}
    return fields


def take_over(path: Path, fields: dict[str, Any]) -> None:
    """Notes here what `as_fields` gave there. Raises OSError; KeyError, ValueError or TypeError for other fields."""
    if "kind" in fields:
        began_ns = time.monotonic_ns() - int(fields["age_ns"])
        kind = _KINDS[_KINDS.index(fields["kind"])]
        text = str(fields["text"])[:_MOST_TEXT]
        path.write_text(f"{began_ns} {kind}\n{text}", "utf-8", errors="backslashreplace")
    for suffix, there in ((_MEMBER, fields["member"]), (_ENDED, fields["ended"])):
        file = Path(f"{path}{suffix}")
        file.touch() if there else file.unlink(missing_ok=True)


def forget(path: Path) -> None:
    """Removes what a worker has noted, before another process takes its place."""
    for suffix in ("", _MEMBER, _ENDED):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def _read(path: Path) -> tuple[str, str]:
    with contextlib.suppress(OSError):
        head, _, text = path.read_text(encoding="utf-8", errors="replace").partition("\n")
        return head, text
    return "", ""


def _touch(suffix: str) -> None:
    path = failure_mark()
    if path is not None:
        with contextlib.suppress(OSError):
            Path(path + suffix).touch()


def _stems_from(error: BaseException | None, *kinds: type[BaseException]) -> bool:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, kinds):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
