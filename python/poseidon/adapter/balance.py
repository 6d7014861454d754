"""Batch sizes that let unequal workers end their steps together."""

from __future__ import annotations

from collections.abc import Sequence

from poseidon.errors import InvalidArgument


def balanced_rows(rows: Sequence[int], seconds: Sequence[float]) -> list[int]:
    """Returns as many rows in all, shared out by the ranks' speeds.

    Rank r took `seconds[r]` for the computation of `rows[r]` rows. If each row takes as long as before, all ranks then
    take equally long, but for the rounding to whole rows. Raises InvalidArgument for a rank without rows or time, whose
    speed is not known.
    """
    for rank, (count, time) in enumerate(zip(rows, seconds, strict=True)):
        if count < 1 or not time > 0:
            raise InvalidArgument(
                f"rank {rank} took {time} s for {count} rows, so its speed is not known: give it rows"
            )
    speeds = [count / time for count, time in zip(rows, seconds, strict=True)]
    shares = [sum(rows) * speed / sum(speeds) for speed in speeds]
    balanced = [max(1, int(share)) for share in shares]
    by_rest = sorted(range(len(rows)), key=lambda rank: (int(shares[rank]) - shares[rank], rank))
    for rank in by_rest[: sum(rows) - sum(balanced)]:  # the largest remainders
        balanced[rank] += 1
    while sum(balanced) > sum(rows):  # ranks that would have got no row have one
        balanced[balanced.index(max(balanced))] -= 1
    return balanced
