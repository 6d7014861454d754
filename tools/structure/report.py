"""What a check prints."""

from __future__ import annotations

from collections.abc import Sequence


def report(name: str, found: Sequence[str], what: str) -> int:
    """Prints what a check has found and how many of `what` that are. Returns the exit status."""
    for one in found:
        print(one)
    print(f"{name}: {len(found)} {what}")
    return 1 if found else 0
