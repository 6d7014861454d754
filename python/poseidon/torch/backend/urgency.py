"""How urgent a collective of the backend is: what is more urgent overtakes what is less so on its way."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

from poseidon import _core
from poseidon.errors import InvalidArgument

_Kind = _core.CollectiveKind
# Computation waits for parameters that are gathered, and for barriers, but for a reduced gradient only at the end.
_BY_KIND = {
    _Kind.barrier: 1.0,
    _Kind.all_gather: 0.8,
    _Kind.broadcast: 0.8,
    _Kind.reduce_scatter: 0.2,
}
_MIDDLE = 0.5
_given: contextvars.ContextVar[float | None] = contextvars.ContextVar("urgency", default=None)


@contextlib.contextmanager
def urgency(value: float) -> Iterator[None]:
    """Collectives of the backend `poseidon` that this thread calls inside are this urgent, from 0 to 1.

    Of what waits to be sent to one rank, more urgent chunks go first. Without this, barriers go before gathers and
    broadcasts, those before reductions, and reduce_scatter is last. It need not be the same on all ranks. Raises
    InvalidArgument for another number.
    """
    if not 0 <= value <= 1:
        raise InvalidArgument(f"urgency is {value}: it must be from 0 to 1")
    token = _given.set(value)
    try:
        yield
    finally:
        _given.reset(token)


def current_urgency(kind: _core.CollectiveKind) -> float:
    """That of a call of this kind now."""
    given = _given.get()
    return _BY_KIND.get(kind, _MIDDLE) if given is None else given
