"""The DSCP code points of the priority classes. Flows are marked with them, and a testbed's ports recognize them."""

from __future__ import annotations

# Expedited forwarding, then assured forwarding of falling precedence (RFC 3246, RFC 2597).
_CODE_POINTS = (46, 34, 26, 18, 10, 36, 28)
MOST_CLASSES = len(_CODE_POINTS) + 1
_MOST_WITH_TWO_CLASSES = 64


def default_classes(worker_count: int, dedicated_servers: bool = False) -> int:
    """How many flows there are between each pair of peers. Many workers that are all servers have fewer connections."""
    return 2 if dedicated_servers or worker_count <= _MOST_WITH_TWO_CLASSES else 1


def default_dscp(class_count: int) -> tuple[int, ...]:
    """One code point for each class, the most urgent class first. The last class is best effort, 0."""
    return (*_CODE_POINTS[: class_count - 1], 0)
