"""Flight records: reads them, and finds out which of them belong together."""

from __future__ import annotations

import json
import os
import stat
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from poseidon.errors import InvalidArgument
from poseidon.live import plain

FORMAT = "poseidon flight record"
_VERSION = 1
_MOST_BYTES = 64 << 20  # of a record
_MOST_FLOAT = 1e11
_GIVE = "give the files that the error messages of the job's processes name"
_MOST = defaultdict(lambda: 1 << 64, world_size=1 << 20, rank=1 << 20, about_rank=1 << 20)
_PATTERN = "poseidon-*.json"
_Kind = TypeVar("_Kind")
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
                raise InvalidArgument(f"there is no flight record ({_PATTERN}) in {path}: {_GIVE}")
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
        content = json.loads(_text(path))
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise InvalidArgument(f"{path} is no flight record, because it is not JSON: {_GIVE}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InvalidArgument(f"{path} is no flight record of Poseidon: {_GIVE}")
    if content.get("format_version") != _VERSION:
        raise InvalidArgument(
            f"{path} was written by another version of Poseidon ({content.get('poseidon')!r}): read it with that one"
        )
    try:
        record = _record(str(path), _plain(content))
        for one in (record, *record.waiting, *record.links, *record.open_chunks):
            _check(one)
        return record
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise InvalidArgument(f"{path} is damaged ({type(error).__name__}: {error}): leave it out") from None


def _text(path: Path) -> str:
    """Raises OSError for what is no file: a pipe would be waited for. The folder may be everybody's."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(0, "it is no file")
        return file.read(_MOST_BYTES).decode("utf-8", errors="replace")


def _plain(content: Any) -> Any:
    """The same with texts that cannot change a terminal: anybody may have written them."""
    if isinstance(content, str):
        return "\n".join(map(plain, content.split("\n")))
    if isinstance(content, list):
        return [_plain(one) for one in content]
    if isinstance(content, dict):
        return {name: _plain(value) for name, value in content.items()}
    return content


def _check(one: Any) -> None:
    """Raises TypeError or ValueError where a field is none of its type, or a number of what there cannot be."""
    for field in fields(one):
        value, words = getattr(one, field.name), str(field.type)
        several = value if words.startswith("tuple[int") else (value,)
        for each in several:
            if "int" in words and each is not None and (type(each) is not int or not -1 <= each < _MOST[field.name]):
                raise ValueError(f"{field.name} is {each!r}")
            if words == "float" and not (isinstance(each, float) and -_MOST_FLOAT < each < _MOST_FLOAT):
                raise ValueError(f"{field.name} is {each!r}")
            if words == "str" and not isinstance(each, str):
                raise TypeError(f"{field.name} is no text")


def _record(path: str, content: dict[str, Any]) -> Record:
    colocated = content["process"] == "worker" and "server" in content
    learnt = content["learnt"]
    about_rank, about_server = _other_end(learnt["party"], learnt["index"], colocated)
    return _taken(
        Record,
        content,
        path=path,
        rank=content["rank"] if content["rank"] >= 0 else None,
        wall_s=float(content["wall_s"]),
        monotonic_s=content["monotonic_ns"] / 1e9,
        timeout_s=float(content["timeout_s"]),
        code=content["error"]["code"],
        message=content["error"]["message"],
        how=learnt["how"],
        about_rank=about_rank,
        about_server=about_server,
        colocated=colocated,
        waiting_count=content.get("waiting_count", 0),
        waiting=tuple(
            _taken(Waiting, one, text=one["for"], ranks=tuple(one["ranks"]), servers=tuple(one["servers"]))
            for one in content.get("waiting", [])
        ),
        links=tuple(_link(one, colocated) for one in content.get("links", [])),
        open_chunks=tuple(
            _taken(OpenChunk, one, missing_ranks=tuple(one["missing_ranks"]))
            for core in content.get("server", [])
            for one in core["open_chunks"]
        ),
    )


def _taken(kind: type[_Kind], content: dict[str, Any], **changed: Any) -> _Kind:
    """An object of this kind: these fields, and the others as the file has them, by their names."""
    names = [field.name for field in fields(kind) if field.name not in changed]  # type: ignore[arg-type]
    return kind(**{name: content[name] for name in names}, **changed)


def _other_end(party: str, index: int | None, colocated: bool) -> tuple[int | None, int | None]:
    """The rank or the dedicated server that a party and its index stand for."""
    if index is None or party == "none":
        return None, None
    return (None, index) if party == "server" and not colocated else (index, None)


def _link(content: dict[str, Any], colocated: bool) -> Link:
    rank, server = _other_end(content["party"], content["index"], colocated)
    return _taken(Link, content, rank=rank, server=server, last_progress_ms=float(content["last_progress_ms"]))
