"""What a job goes on without: told once per process, when it has joined."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from poseidon._core import Client


def tell_notices(client: Client) -> None:
    """Warns of each of the client's notices; Python's filters show a warning of one place once."""
    for text in client.notices():
        warnings.warn(text, stacklevel=2)
