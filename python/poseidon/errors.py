"""The errors that Poseidon raises: one class per error code of the core.

Each message names the rank, peer, layer and phase as far as they are known, and says what to try.
"""

from __future__ import annotations

_RECORD = "; flight record: "
_READ_IT = " (bring those of all machines together: poseidon doctor FILE...)"


class PoseidonError(RuntimeError):
    """Base of all errors of this package. `code` is the core's name of the kind of error."""

    code = "error"

    def __str__(self) -> str:
        """The message. One that names a flight record says what to run next."""
        text = super().__str__()
        return text + _READ_IT if _RECORD in text and _READ_IT not in text else text


class InvalidArgument(PoseidonError, ValueError):
    """The caller passed something that cannot work; nothing was sent."""

    code = "invalid_argument"


class PoseidonTimeout(PoseidonError, TimeoutError):
    """A deadline passed; the message names who was waited for."""

    code = "timeout"


class PeerLost(PoseidonError):
    """A connection ended while something was still expected from it."""

    code = "peer_lost"


class Mismatch(PoseidonError):
    """The ranks disagree on the model, a dtype, a version or an option."""

    code = "mismatch"
    groups: tuple[int, ...] = ()  # by rank, where it is known: equal numbers for ranks that agree


class Refused(PoseidonError):
    """A server refused a request of this worker alone."""

    code = "refused"


class Unreachable(PoseidonError):
    """Connecting failed, or an address cannot be bound."""

    code = "unreachable"


class Aborted(PoseidonError):
    """Another rank failed first; the message gives its reason."""

    code = "aborted"


class ShutDown(PoseidonError):
    """The operation came before `init()` or after `shutdown()`."""

    code = "shut_down"


class Evicted(PoseidonError):
    """The operator of a server has ended the job there. It is not to start again by itself."""

    code = "evicted"


SURVIVABLE = (PeerLost, Aborted, PoseidonTimeout, Unreachable, Refused)
"""What the failure of another process, or of the network, looks like: training can go on with a replacement."""

_BY_CODE: dict[str, type[PoseidonError]] = {
    cls.code: cls
    for cls in (InvalidArgument, PoseidonTimeout, PeerLost, Mismatch, Refused, Unreachable, Aborted, ShutDown, Evicted)
}


def by_code(name: str) -> type[PoseidonError]:
    """The class for an error code such as "peer_lost", or PoseidonError for an unknown code."""
    return _BY_CODE.get(name, PoseidonError)
