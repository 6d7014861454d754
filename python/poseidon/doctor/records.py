"""Flight records: reads them, and finds out which of them belong together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poseidon.errors import InvalidArgument

FORMAT = "poseidon flight record"
_VERSION = 1
_PATTERN = "poseidon-*.json"
_ONE_FAILURE_S = 60.0  # records without a common run belong to one failure if they are closer than this


@dataclass(frozen=True)
class Link:
    """A connection as the record's process saw it, to a rank or to a dedicated server."""

    rank: int | None
    server: int | None
    host: str
    address: str
    connected: bool
    left: bool
    last_progress_ms: float


@dataclass(frozen=True)
class Waiting:
    """An exchange that was not complete: the parts of `ranks` and the results of `servers` were missing."""

    layer: str
    unit: int
    step: int
    text: str
    ranks: tuple[int, ...]
    servers: tuple[int, ...]


@dataclass(frozen=True)
class OpenChunk:
    """A step that a server could not end, because the pushes of `missing_ranks` had not come."""

    unit: int
    step: int
    missing_ranks: tuple[int, ...]


@dataclass(frozen=True)
class Record:
    """One process's record. `how` it learnt of the failure and from or about whom (`rank`s; None where not known).

    `colocated`: it has a server of its own, and server i is rank i's.
    """

    path: str
    process: str
    job: str
    run: str
    generation: int
    rank: int | None
    world_size: int
    host: str
    boot: str
    pid: int
    wall_s: float
    monotonic_s: float
    timeout_s: float
    phase: str
    code: str
    message: str
    how: str
    about_rank: int | None
    about_server: int | None
    colocated: bool
    waiting_count: int
    waiting: tuple[Waiting, ...]
    links: tuple[Link, ...]
    open_chunks: tuple[OpenChunk, ...]

    def seconds_after(self, other: Record) -> float | None:
        """How many seconds later this process failed. None if the clocks cannot be compared (different machines)."""
        return self.monotonic_s - other.monotonic_s if self.boot and self.boot == other.boot else None


def load(paths: Iterable[Path]) -> list[Record]:
    """The records in these files, and in the files of these directories that have a record's name.

    Raises InvalidArgument for a path that does not exist, a file that is no record, a directory without any.
    """
    records = []
    for path in paths:
        if path.is_dir():
            found = [record for file in sorted(path.glob(_PATTERN)) if (record := _read_if_record(file)) is not None]
            if not found:
                raise InvalidArgument(f"there is no flight record ({_PATTERN}) in {path}")
            records += found
        else:
            records.append(_read(path))
    return records


def group(records: Iterable[Record]) -> list[list[Record]]:
    """Groups the records by failure, the newest failure last. A group has workers by rank, then servers."""
    workers: dict[tuple[Any, ...], list[Record]] = {}
    others = []
    for record in sorted(records, key=lambda record: record.wall_s):
        if record.run:
            workers.setdefault((record.job, record.generation, record.run), []).append(record)
        else:
            others.append(record)
    groups = list(workers.values())
    for record in others:
        near = [one for one in groups if _is_near(record, one)]
        if near:
            min(near, key=lambda one: abs(one[0].wall_s - record.wall_s)).append(record)
        else:
            groups.append([record])
    for one in groups:
        one.sort(key=lambda record: (record.rank is None, record.rank or 0, record.wall_s))
    return sorted(groups, key=lambda one: max(record.wall_s for record in one))


def _is_near(record: Record, one: Sequence[Record]) -> bool:
    first = one[0]
    same = (record.job, record.generation) == (first.job, first.generation)
    # A worker that has not met the others yet cannot be of a membership that they have formed.
    same = same and (record.process == "server" or not first.run)
    return same and abs(record.wall_s - first.wall_s) < max(_ONE_FAILURE_S, record.timeout_s)


def _read_if_record(path: Path) -> Record | None:
    try:
        return _read(path)
    except InvalidArgument:
        return None  # another kind of file with such a name, or a file of another user


def _read(path: Path) -> Record:
    try:
        content = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise InvalidArgument(f"{path} is no flight record: it is not JSON") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InvalidArgument(f"{path} is no flight record of Poseidon")
    if content.get("format_version") != _VERSION:
        raise InvalidArgument(f"{path} was written by another version of Poseidon ({content.get('poseidon')})")
    try:
        return _record(str(path), content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidArgument(f"{path} is damaged: {type(error).__name__}: {error}") from None


def _record(path: str, content: dict[str, Any]) -> Record:
    colocated = content["process"] == "worker" and "server" in content
    learnt = content["learnt"]
    about_rank, about_server = _other_end(learnt["party"], learnt["index"], colocated)
    cores = content.get("server", [])
    return Record(
        path=path,
        process=content["process"],
        job=content["job"],
        run=content["run"],
        generation=content["generation"],
        rank=content["rank"] if content["rank"] >= 0 else None,
        world_size=content["world_size"],
        host=content["host"],
        boot=content["boot"],
        pid=content["pid"],
        wall_s=float(content["wall_s"]),
        monotonic_s=content["monotonic_ns"] / 1e9,
        timeout_s=float(content["timeout_s"]),
        phase=content["phase"],
        code=content["error"]["code"],
        message=content["error"]["message"],
        how=learnt["how"],
        about_rank=about_rank,
        about_server=about_server,
        colocated=colocated,
        waiting_count=content.get("waiting_count", 0),
        waiting=tuple(_waiting(one) for one in content.get("waiting", [])),
        links=tuple(_link(one, colocated) for one in content.get("links", [])),
        open_chunks=tuple(
            OpenChunk(one["unit"], one["step"], tuple(one["missing_ranks"]))
            for core in cores
            for one in core["open_chunks"]
        ),
    )


def _other_end(party: str, index: int | None, colocated: bool) -> tuple[int | None, int | None]:
    """The rank or the dedicated server that a party and its index stand for."""
    if index is None or party == "none":
        return None, None
    return (None, index) if party == "server" and not colocated else (index, None)


def _link(content: dict[str, Any], colocated: bool) -> Link:
    rank, server = _other_end(content["party"], content["index"], colocated)
    return Link(
        rank=rank,
        server=server,
        host=content["host"],
        address=content["address"],
        connected=content["connected"],
        left=content["left"],
        last_progress_ms=float(content["last_progress_ms"]),
    )


def _waiting(content: dict[str, Any]) -> Waiting:
    return Waiting(
        layer=content["layer"],
        unit=content["unit"],
        step=content["step"],
        text=content["for"],
        ranks=tuple(content["ranks"]),
        servers=tuple(content["servers"]),
    )
