"""The facts in the records of one failure. The verdict follows from them (verdict.py)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

from poseidon.doctor.records import Record, Waiting


class Evidence:
    """The records of one failure. Ranks are those of all the job's workers, with and without a record."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records
        self.by_rank = {record.rank: record for record in records if record.rank is not None}
        self.world_size = max(record.world_size for record in records)
        self.silent_ranks = [rank for rank in range(self.world_size) if rank not in self.by_rank]

    @cached_property
    def hosts(self) -> dict[int, str]:
        """The machines of the ranks, as far as the records name them."""
        hosts = {link.rank: link.host for record in self.records for link in record.links if link.rank is not None}
        return {rank: host for rank, host in hosts.items() if host} | {r: one.host for r, one in self.by_rank.items()}

    def name(self, ranks: Iterable[int]) -> str:
        """ "rank 2 on host-b", "ranks 1, 2 on host-b"."""
        ordered = sorted(ranks)
        hosts = sorted({self.hosts[rank] for rank in ordered if rank in self.hosts})
        text = ("rank " if len(ordered) == 1 else "ranks ") + ", ".join(map(str, ordered))
        return text + (f" on {', '.join(hosts)}" if hosts else "")

    def first(self, records: Sequence[Record]) -> Record:
        """The earliest record, if the clocks can be compared. Otherwise the record of the lowest rank."""
        earliest = records[0]
        for record in records[1:]:
            after = record.seconds_after(earliest)
            if after is not None and after < 0:
                earliest = record
        return earliest

    def learnt(self, *how: str) -> list[Record]:
        """The records of processes that learnt of the failure in one of these ways."""
        return [record for record in self.records if record.how in how]

    def accused(self, *how: str) -> dict[int, list[Record]]:
        """The ranks about which others learnt in one of these ways, with the records that say so."""
        accused: dict[int, list[Record]] = {}
        for record in self.learnt(*how):
            if record.about_rank is not None and record.about_rank != record.rank:
                accused.setdefault(record.about_rank, []).append(record)
        return accused

    @cached_property
    def missed(self) -> dict[int, list[str]]:
        """The ranks on whose part of an exchange others still waited, with the records of those others."""
        missed: dict[int, list[str]] = {}
        for record in self.records:
            for rank in {rank for *_, ranks in _awaited(record) for rank in ranks}:
                missed.setdefault(rank, []).append(_process(record))
        return missed

    @cached_property
    def broken_paths(self) -> set[tuple[int, int]]:
        """Pairs (from, to) such that messages of a step that the first has sent have not reached the second."""
        return {
            (rank, record.rank)
            for record in self.records
            if record.rank is not None
            for unit, step, ranks in _awaited(record)
            for rank in ranks
            if self._has_started(rank, unit, step)
        }

    def _has_started(self, rank: int, unit: int, step: int) -> bool:
        record = self.by_rank.get(rank)
        return record is not None and any((one.unit, one.step) == (unit, step) for one in record.waiting)

    def still_connected(self, rank: int) -> bool:
        """Whether every process that has left a record still had a connection to the rank."""
        links = [link for record in self.records for link in record.links if link.rank == rank]
        return bool(links) and all(link.connected for link in links)

    def longest_silence_s(self, rank: int) -> float:
        """For how many seconds nothing had come from the rank, according to the process that heard from it last."""
        heard = [link.last_progress_ms for record in self.records for link in record.links if link.rank == rank]
        return min(heard, default=0.0) / 1e3

    @cached_property
    def sides(self) -> list[set[int]]:
        """Groups of living ranks between which no message arrived. Usually there is one group with all ranks."""
        lost = {
            frozenset((rank, one.rank))
            for rank, accusers in self.accused("lost", "unreachable").items()
            for one in accusers
            if rank in self.by_rank and one.rank is not None
        }
        if not lost:
            return _components([{rank} for rank in self.by_rank], {frozenset(path) for path in self.broken_paths})
        # A process that could tell another about the failure is on the same side.
        told = {frozenset((one.rank, one.about_rank)) for one in self.learnt("told") if one.about_rank in self.by_rank}
        everyone = [{rank} for rank in self.by_rank]
        apart = {frozenset((a, b)) for a in self.by_rank for b in self.by_rank if a < b} - told
        return _components(_components(everyone, apart), lost)


def waited_text(waiting: Sequence[Waiting]) -> str:
    """A text that says what a record's process waited for first."""
    return f"layer {waiting[0].layer!r} in step {waiting[0].step}" if waiting else "nothing"


def _awaited(record: Record) -> list[tuple[int, int, set[int]]]:
    """The unit and the step of each exchange that was not complete, and the other ranks whose parts were missing."""
    open_ones = [(chunk.unit, chunk.step, chunk.missing_ranks) for chunk in record.open_chunks]
    open_ones += [(waiting.unit, waiting.step, waiting.ranks) for waiting in record.waiting]
    return [(unit, step, {rank for rank in ranks if rank != record.rank}) for unit, step, ranks in open_ones]


def _process(record: Record) -> str:
    return f"rank {record.rank}" if record.rank is not None else "a server"


def _components(sides: list[set[int]], cut: set[frozenset[int]]) -> list[set[int]]:
    """Groups members that are connected, directly or through others."""
    joined: list[set[int]] = []
    left = list(sides)
    while left:
        component = [left.pop(0)]
        for side in component:
            near = [one for one in left if not any(frozenset((a, b)) in cut for a in side for b in one)]
            left = [one for one in left if one not in near]
            component += near
        joined.append(set().union(*component))
    return sorted(joined, key=min)
