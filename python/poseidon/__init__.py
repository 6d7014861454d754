"""Poseidon: wait-free, hybrid gradient exchange for synchronous data-parallel training.

`import poseidon.torch as poseidon` is what a PyTorch program needs; this package itself holds what
all frameworks share.
"""

from poseidon.errors import (
    Aborted,
    InvalidArgument,
    Mismatch,
    PeerLost,
    PoseidonError,
    PoseidonTimeout,
    Refused,
    ShutDown,
    Unreachable,
)

__version__ = "0.1.0"

__all__ = [
    "Aborted",
    "InvalidArgument",
    "Mismatch",
    "PeerLost",
    "PoseidonError",
    "PoseidonTimeout",
    "Refused",
    "ShutDown",
    "Unreachable",
    "__version__",
]
