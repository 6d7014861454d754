"""What a job goes on without: told when the process has joined, and now and then afterwards."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from poseidon._core import Client


def tell_notices(client: Client, told: int = 0) -> int:
    """Warns of the client's notices but the first `told`, and returns how many there are now."""
    notices = client.notices()
    for text in notices[told:]:
        warnings.warn(text, stacklevel=2)
    return len(notices)
