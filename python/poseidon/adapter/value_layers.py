"""The core's layers for values that a program reduces over all ranks (`all_reduce` of an adapter)."""

from __future__ import annotations

from poseidon import _core
from poseidon.adapter.membership import Membership


def value_layer(here: Membership, dtype: str, count: int, divisor: int) -> int:
    """The layer of a job for vectors of `count` elements whose sum is divided by `divisor`. Collective for new ones."""
    name = f"all_reduce of {count} {dtype}{' as a mean' * (divisor > 1)}"
    known = here.value_layers
    if name not in known:
        known[name], _ = here.present_client.add_layers([_core.Layer(name, dtype, count, 0, 0, "ps")], transient=True)
    return known[name]
