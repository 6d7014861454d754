"""Which host of a recorded run has a slow port."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from poseidon.adapter.run_record import RunRecord

_LEAST_HOSTS = 3  # of two, both have the rate of the slower
_SLOW = 0.6  # of what a usual host's best connection carries, or less

_Sent = dict[tuple[int, int], tuple[int, float]]  # from rank to rank: bytes, and seconds in which some were on the way


def slow_port(records: Sequence[RunRecord]) -> tuple[int, float] | None:
    """The rank whose host's port is slow, and how many times as fast the others' ports are at least. None: none is.

    A slow port slows down every connection of its host, in one direction at least. All other hosts have a fast
    connection to somebody. What these carry is less than their ports can, because they carry the bytes to and from the
    slow port, too, and pause between exchanges. Only runs with one worker on each host are looked at.
    """
    sent, ranks = _sent(records), range(len(records))
    if len(records) < _LEAST_HOSTS or any((one, other) not in sent for one in ranks for other in ranks if one != other):
        return None
    best = [max(_pair(sent, rank, other) for other in ranks if other != rank) for rank in ranks]
    slow = min(ranks, key=best.__getitem__)
    if best[slow] > _SLOW * median(best[rank] for rank in ranks if rank != slow):
        return None
    fast = [rank for rank in ranks if rank != slow]
    usual = median(_port(sent, rank, [other for other in fast if other != rank]) for rank in fast)
    ratio = usual / _port(sent, slow, fast)
    return (slow, ratio) if ratio > 1 else None


def _sent(records: Sequence[RunRecord]) -> _Sent:
    """What ranks have sent to each other, as far as addresses tell the ranks."""
    owners: dict[str, list[int]] = {}
    for rank, record in enumerate(records):
        for address in record.addresses:
            owners.setdefault(address, []).append(rank)
    found = {}
    for rank, record in enumerate(records):
        for address, flow in record.sent.items():
            owner = owners.get(address, [])
            if len(owner) == 1 and owner != [rank]:
                found[rank, owner[0]] = flow
    return found


def _pair(sent: _Sent, one: int, other: int) -> float:
    """The bytes per second between two ranks, in the slower direction."""
    return min(size / seconds for size, seconds in (sent[one, other], sent[other, one]))


def _port(sent: _Sent, rank: int, others: Sequence[int]) -> float:
    """The bytes per second of a rank's port to and from these ranks, in the slower direction.

    Their connections share it, and are busy for about the same time.
    """
    out, into = [sent[rank, other] for other in others], [sent[other, rank] for other in others]
    return min(sum(size for size, _ in flows) / max(seconds for _, seconds in flows) for flows in (out, into))
