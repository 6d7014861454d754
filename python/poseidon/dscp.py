"""The code points that mark the priority classes of flows, and by which a testbed's ports tell them apart."""

from __future__ import annotations

# Expedited forwarding, then assured forwarding of falling precedence (RFC 3246, RFC 2597).
_CODE_POINTS = (46, 34, 26, 18, 10, 36, 28)
MOST_CLASSES = len(_CODE_POINTS) + 1


def default_dscp(class_count: int) -> tuple[int, ...]:
    """One code point for each class, the most urgent first; the last class is best effort, 0."""
    return (*_CODE_POINTS[: class_count - 1], 0)
