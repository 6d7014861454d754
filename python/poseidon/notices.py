"""Warnings about what does not work although the job goes on: after the process has joined, and sometimes later."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from poseidon._core import Client


def tell_notices(client: Client) -> None:
    """Warns of the client's notices that it has not told yet. Its waits call this, too.

    It raises nothing: where the program makes warnings errors, it prints them.
    """
    for text in client.fresh_notices():
        try:
            warnings.warn(text, stacklevel=2)
        except Warning:
            print(f"poseidon: {text}", file=sys.stderr)
