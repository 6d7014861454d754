"""Newcomers that do not fit a job that goes on: they end, and the job goes on without them."""

from __future__ import annotations

from collections.abc import Sequence

from poseidon.errors import Aborted, Mismatch, PoseidonError


class UnfitNewcomers(Aborted):
    """Processes that wanted to join have built something else than the members, who meet again without them."""

    @staticmethod
    def of(ranks: Sequence[int], error: PoseidonError) -> UnfitNewcomers:
        """What the members are told of this error, which is the newcomers' alone."""
        return UnfitNewcomers(f"rank {', '.join(map(str, ranks))}, which wanted to join, is refused: {error}")


def unfit_newcomers(error: PoseidonError, are_new: Sequence[bool]) -> tuple[int, ...]:
    """The ranks of the newcomers that differ from all members; none where members differ from each other, too."""
    groups = dict(enumerate(error.groups)) if isinstance(error, Mismatch) else {}
    of_members = {groups[rank] for rank, is_new in enumerate(are_new) if not is_new and rank in groups}
    if len(of_members) != 1:
        return ()
    return tuple(rank for rank, group in groups.items() if group not in of_members)
