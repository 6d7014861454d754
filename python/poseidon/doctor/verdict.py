"""Says who started a failure, and why, as far as the records show it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

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
            if rank in self.by_rank and (unit, step) in {(one.unit, one.step) for one in self.by_rank[rank].waiting}
        }

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


_OWN_WORDS = re.compile(r"^.*? ended the job: ")
_HEARS_NOBODY = "this machine hears no other one"  # src/client/connections_report.cc
_DISAGREEMENT = re.compile(r"\bMismatch\b|built different models|same scheme on all ranks")


@dataclass(frozen=True)
class Verdict:
    """What happened (`kind`), who started it, and a sentence that says so. Both lists may be empty."""

    kind: str
    ranks: tuple[int, ...]
    servers: tuple[int, ...]
    text: str


def diagnose(records: list[Record]) -> Verdict:
    """The verdict on the records of one failure."""
    evidence = Evidence(records)
    for judge in _JUDGES:
        verdict = judge(evidence)
        if verdict is not None:
            return verdict
    raise AssertionError("the last judge always has an answer")


def _verdict(kind: str, text: str, ranks: Any = (), servers: Any = ()) -> Verdict:
    return Verdict(kind, tuple(sorted(ranks)), tuple(sorted(servers)), text)


def _ended_by_itself(evidence: Evidence) -> Verdict | None:
    own = evidence.learnt("own")
    if not own:
        return None
    first = evidence.first(own)
    assert first.rank is not None
    reason = _OWN_WORDS.sub("", first.message).split("; flight record: ")[0]
    ranks = [record.rank for record in own if record.rank is not None]
    if _DISAGREEMENT.search(reason):
        return _verdict("mismatch", f"the ranks disagree, as {evidence.name(ranks)} found: {reason}", ranks)
    if "interrupted" in reason:
        return _verdict("interrupted", f"{evidence.name(ranks)} was interrupted (Ctrl-C): {reason}", ranks)
    text = f"{evidence.name([first.rank])} ended the job for a reason of its own: {reason}"
    if len(own) > 1:
        text += f"; so did {evidence.name(set(ranks) - {first.rank})}"
        if any(record.seconds_after(first) is None for record in own):
            text += ", and whose clock came first is not known"
        else:
            ranks = [first.rank]
    return _verdict("exception", text, ranks)


def _left_early(evidence: Evidence) -> Verdict | None:
    left = evidence.accused("left")
    if not left:
        return None
    text = (
        f"{evidence.name(left)} shut down while others went on; give every rank the same number of steps, or use join()"
    )
    return _verdict("left", text, left)


def _cut_off(evidence: Evidence) -> Verdict | None:
    """A machine that has heard no other one says nothing about them. Where they have no record, it is the suspect."""
    alone = [record for record in evidence.learnt("lost", "unreachable") if _HEARS_NOBODY in record.message]
    ranks = [record.rank for record in alone if record.rank is not None]
    hosts = {evidence.hosts[rank] for rank in ranks if rank in evidence.hosts}
    if not ranks or len(hosts) != 1 or {one.host for one in evidence.by_rank.values()} != hosts:
        return None
    text = f"{evidence.name(ranks)} is cut off: nothing came from any other machine. Look at this machine's own cable, "
    text += "port and network; the others may have gone on living, and their records say so"
    return _verdict("cut", text, ranks)


def _killed(evidence: Evidence) -> Verdict | None:
    lost = evidence.accused("lost", "unreachable")
    gone = {rank: accusers for rank, accusers in lost.items() if rank not in evidence.by_rank}
    if gone:
        records = [record for accusers in gone.values() for record in accusers]
        ended = re.search(r"ended \(([^()]*)\)", records[0].message)
        reason = ended[1] if ended else records[0].code  # the system's message about the end of the connection
        text = f"{evidence.name(gone)} died: {_losers(evidence, records)} lost the connection ({reason}), and there is "
        text += "no record of it, which a process leaves that fails by itself. It was killed or crashed (see its "
        text += "output, and the kernel's log for want of memory), or its machine died"
        host = _dead_host(evidence, set(gone))
        if host:
            text += f"; of {host} no rank has left a record, so suspect the machine first"
        return _verdict("killed", text, gone)
    servers = {record.about_server for record in evidence.learnt("lost", "unreachable")} - {None}
    if not servers:
        return None
    names = ", ".join(str(server) for server in sorted(servers, key=str))
    return _verdict(
        "killed",
        f"server {names} died or is cut off: {_losers(evidence, evidence.learnt('lost'))} "
        "lost the connection to it; see its output",
        servers=servers,
    )


def _cut(evidence: Evidence) -> Verdict | None:
    if len(evidence.sides) < 2:
        return None
    sides = " and ".join(evidence.name(side) for side in evidence.sides)
    text = f"the network between {sides} is cut: all of them were alive and have left records, but what one side sent "
    text += "did not come to the other"
    return _verdict("cut", text, set().union(*evidence.sides))


def _broken_path(evidence: Evidence) -> Verdict | None:
    if not evidence.broken_paths or len(evidence.sides) > 1:
        return None
    paths = ", ".join(f"rank {a} to rank {b}" for a, b in sorted(evidence.broken_paths))
    ranks = {rank for path in evidence.broken_paths for rank in path}
    text = f"what was sent did not arrive: from {paths}. The ranks were alive: the network loses packets one way or is "
    text += "slower than the timeout allows"
    return _verdict("path", text, ranks)


def _frozen(evidence: Evidence) -> Verdict | None:
    frozen = {rank for rank in evidence.missed if rank not in evidence.by_rank and evidence.still_connected(rank)}
    if not frozen:
        silent = evidence.learnt("silent")
        awaited = {rank for one in silent if one.colocated for waiting in one.waiting for rank in waiting.servers}
        frozen = {rank for rank in awaited if rank not in evidence.by_rank and evidence.still_connected(rank)}
    if not frozen:
        return None
    silence_s = min(evidence.longest_silence_s(rank) for rank in frozen)
    text = f"{evidence.name(frozen)} froze: it was connected, but nothing had come from it for {silence_s:.1f} s, and "
    text += (
        "it has left no record. It is stopped (SIGSTOP, a debugger), swapped out, or its machine hangs or is cut off"
    )
    return _verdict("frozen", text, frozen)


def _late(evidence: Evidence) -> Verdict | None:
    if not evidence.learnt("silent"):
        return None
    late = {rank: evidence.by_rank[rank] for rank in evidence.missed if rank in evidence.by_rank}
    idle = [rank for rank, record in late.items() if record.waiting_count == 0]
    others = [record for record in evidence.records if record.rank not in late and record.waiting]
    waited = waited_text(others[0].waiting) if others else "its part"
    if idle:
        text = f"{evidence.name(idle)} did not start {waited}, for which the others waited until the timeout: its own "
        text += "work took longer (data, evaluation, a checkpoint), it took another path through the model, or it hung"
        return _verdict("late", text, idle)
    if late:
        own = "; ".join(f"rank {rank} waited for {waited_text(record.waiting)}" for rank, record in late.items())
        text = (
            f"the ranks exchange different things: others waited for {waited}, {own}; every rank has to run the same "
        )
        text += "layers in every step"
        return _verdict("diverged", text, late)
    return None


def _misfit(evidence: Evidence) -> Verdict | None:
    found = evidence.learnt("found", "refused")
    if not found:
        return None
    first = evidence.first(found)
    ranks = {rank for rank in (first.rank, first.about_rank) if rank is not None}
    kind = "mismatch" if first.code == "mismatch" else "refused"
    text = f"messages did not fit ({first.code}): {first.message.split('; flight record: ')[0]}"
    return _verdict(kind, text, ranks)


def _absent(evidence: Evidence) -> Verdict | None:
    waiting = [
        record
        for record in evidence.records
        if (record.phase == "meeting" and record.code == "timeout") or record.code == "unreachable"
    ]
    if not waiting:
        return None
    absent = evidence.silent_ranks
    return _verdict(
        "absent", "the ranks did not all find each other: " + waiting[0].message.split("; flight record: ")[0], absent
    )


def _unknown(evidence: Evidence) -> Verdict:
    tellers = {record.about_rank for record in evidence.learnt("told")} - set(evidence.by_rank) - {None}
    first = evidence.first(evidence.records)
    message = first.message.split("; flight record: ")[0]
    if tellers:
        names = evidence.name(rank for rank in tellers if rank is not None)
        return _verdict("unknown", f"{names} told the others; give its record, too. It said: {message}", tellers)
    return _verdict("unknown", f"these records do not tell who started it. The first message: {message}")


_JUDGES: tuple[Callable[[Evidence], Verdict | None], ...] = (
    _ended_by_itself,
    _left_early,
    _cut_off,
    _killed,
    _cut,
    _frozen,
    _broken_path,
    _late,
    _absent,
    _misfit,
    _unknown,
)


def _losers(evidence: Evidence, records: list[Record]) -> str:
    ranks = {record.rank for record in records if record.rank is not None}
    return evidence.name(ranks) if ranks else "a server"


def _dead_host(evidence: Evidence, gone: set[int]) -> str | None:
    """A machine with several ranks, none of which has left a record."""
    for host in {evidence.hosts[rank] for rank in gone if rank in evidence.hosts}:
        there = {rank for rank, name in evidence.hosts.items() if name == host}
        if len(there) > 1 and not there & set(evidence.by_rank):
            return host
    return None
