"""Where a scheme stops paying: up to how many workers it has the fewest bytes for a layer."""

from __future__ import annotations

from bisect import bisect_left

from poseidon import _core
from poseidon.planner.cluster import MOST_WORKERS
from poseidon.planner.workload import Workload


def limits_by_layer(work: Workload) -> dict[str, list[tuple[str, int]]]:
    """For each layer with a choice: the schemes with the fewest bytes, and up to how many workers each has them."""
    found = {}
    for unit in work.units:
        if len(unit.schemes) > 1 and not unit.members[0].row_gradient:
            found[unit.name] = _limits(unit.members[0].asked, unit.factor_count)
    return found


def _limits(layer: _core.Layer, factor_count: int) -> list[tuple[str, int]]:
    def best(count: int) -> str:
        return _core.best_scheme(layer, factor_count, _core.Cluster(count, count))

    def end_of(scheme: str, first: int) -> int:
        """The number from which on it is another one."""
        return bisect_left(range(MOST_WORKERS + 1), True, first, key=lambda count: best(count) != scheme)

    limits, count = [], 2
    while count <= MOST_WORKERS:
        scheme = best(count)
        count = end_of(scheme, count)
        limits.append((scheme, count - 1))
    return limits
