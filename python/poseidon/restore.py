"""Going on from what the servers have saved (docs/checkpoints.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from poseidon.errors import Mismatch

if TYPE_CHECKING:
    from poseidon._core import Client

_LOOKS = 3

Wanted = Sequence[tuple[str, int, Any]]
"""Names, layers and arrays to receive into, none of them empty."""


def restore(client: Client, wanted: Wanted, limit: int = 0) -> int:
    """Makes the servers take these layers from the newest checkpoint that all of them have whole. One rank calls it.

    `limit` is the newest version that may be used; 0 permits any version, NO_VERSION none. Returns the version, which
    is the step after which it was taken, and fills the arrays with the values. Returns 0 if there is no version.
    Raises Refused if the checkpoint does not fit the layers, and Mismatch if some server has none.
    """
    looks_left = _LOOKS
    while wanted:
        for _, layer, destination in wanted:
            client.restore(layer, destination, limit)
        for _, layer, _ in wanted:
            client.wait(layer)
        stats = [client.layer_stats(layer) for _, layer, _ in wanted]
        oldest = min(one.oldest_version for one in stats)
        if all(one.newest_version == oldest for one in stats):
            return oldest
        limit = oldest or limit
        # The first version may have become complete between two servers' looks.
        looks_left -= oldest == 0
        if looks_left == 0:
            names = ", ".join(name for (name, _, _), one in zip(wanted, stats, strict=True) if not one.oldest_version)
            message = (
                f"some servers have checkpoints of this job and others none, for {names}: give all servers the same "
                "checkpoint_dir, one that they share"
            )
            client.abort(message)
            raise Mismatch(message)
    return 0
