"""Warnings about what does not work although the job goes on: after the process has joined, and sometimes later."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from poseidon._core import Client


def tell_notices(client: Client, told: int = 0) -> int:
    """Warns of the client's notices except the first `told` ones, and returns how many there are now."""
    notices = client.notices()
    for text in notices[told:]:
        warnings.warn(text, stacklevel=2)
    return len(notices)
