"""Poseidon: wait-free, hybrid gradient exchange for synchronous data-parallel training.

`import poseidon.torch as poseidon` is what a PyTorch program needs; this package itself holds what
all frameworks share. `poseidon.connect` is for everything that is not PyTorch: push and pull on arrays.
"""

from typing import TYPE_CHECKING, Any

from poseidon.errors import (
    Aborted,
    Evicted,
    InvalidArgument,
    Mismatch,
    PeerLost,
    PoseidonError,
    PoseidonTimeout,
    Refused,
    ShutDown,
    Unreachable,
)
from poseidon.version import VERSION

__version__ = VERSION

__all__ = [
    "Aborted",
    "Evicted",
    "Exchange",
    "Handle",
    "InvalidArgument",
    "Mismatch",
    "PeerLost",
    "PoseidonError",
    "PoseidonTimeout",
    "Refused",
    "ShutDown",
    "Unreachable",
    "UpdateRule",
    "__version__",
    "connect",
]


if TYPE_CHECKING:
    from poseidon.exchange import Exchange, Handle, UpdateRule, connect
else:

    def __getattr__(name: str) -> Any:
        # Not at the start: the command line's help needs neither NumPy nor the compiled core.
        if name in ("Exchange", "Handle", "UpdateRule", "connect"):
            from poseidon import exchange

            return getattr(exchange, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
