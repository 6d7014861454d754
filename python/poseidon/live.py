"""What every worker tells about its training while it runs, for those who watch it on its machine (docs/watching.md).

A worker keeps its figures in a file. It listens on nothing and waits for nobody. The file lies in the machine's memory,
in a folder that only the worker's user can enter. The worker holds a lock on it, so a file without one is that of a
process that has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import stat
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

_LEAST_BYTES = 64 << 10  # below that a rate would be one of waiting
_PREFIX = "poseidon-"
_NEW = "new-"  # of a file that has no lock yet
_READS = 5  # of a file that is being written
_MOST_BYTES = 64 << 20  # of a file: some hundred bytes for each layer


@dataclass(frozen=True)
class LayerFigures:
    """A layer's exchange in one step: the bytes of this worker, headers included, and from gradient to result."""

    name: str
    scheme: str
    bytes_sent: int
    bytes_received: int
    seconds: float


@dataclass(frozen=True)
class LinkFigures:
    """What the kernel knows of this worker's TCP connections to one address.

    `bits_per_s`: of what was sent since the figures before, while something waited for its acknowledgement. None: too
    little was sent.
    """

    peer: str
    bits_per_s: float | None
    round_trip_s: float
    resent_packets: int  # since the connections began


@dataclass(frozen=True)
class WorkerFigures:
    """What a worker is doing. Totals are of this generation of the job; `layers` are those of the step `step`.

    `run` is the same for the workers of one generation, and tells it from other runs of a job of this name.
    `stall_s`: of a step, in which the training waited for results. `step_s` and `stall_s` are means since the figures
    before.
    """

    job: str
    run: str
    rank: int
    world_size: int
    generation: int
    host: str
    pid: int
    written_at: float  # seconds since 1970
    step: int
    step_s: float
    stall_s: float
    stalled_total_s: float
    bytes_sent: int  # over the network
    bytes_received: int
    plain_bytes_sent: int  # what these two would be without coding
    plain_bytes_received: int
    layers: tuple[LayerFigures, ...]  # in the order of backward
    links: tuple[LinkFigures, ...]

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> WorkerFigures:
        """What `dataclasses.asdict` has made plain data. Raises ValueError or TypeError for what it has not made."""
        layers, links = content["layers"], content["links"]
        if not isinstance(layers, Sequence) or not isinstance(links, Sequence):
            raise TypeError("layers and links are lists")
        return cls(
            **_checked(cls, {name: value for name, value in content.items() if name not in ("layers", "links")}),
            layers=tuple(LayerFigures(**_checked(LayerFigures, layer)) for layer in layers),
            links=tuple(LinkFigures(**_checked(LinkFigures, link)) for link in links),
        )

    @property
    def run_key(self) -> tuple[str, str]:
        """What the workers of one run have in common: its job's name, and what tells it from others of this name."""
        return self.job, self.run

    @property
    def bytes_by_scheme(self) -> dict[str, int]:
        """Bytes that this worker sent and received in the step, by scheme."""
        sums: dict[str, int] = {}
        for layer in self.layers:
            sums[layer.scheme] = sums.get(layer.scheme, 0) + layer.bytes_sent + layer.bytes_received
        return sums

    @property
    def scalars(self) -> dict[str, float]:
        """The figures that are curves over a run, by name."""
        by_scheme = {f"poseidon/step_bytes/{scheme}": float(size) for scheme, size in self.bytes_by_scheme.items()}
        link = self.slowest_link
        rate = {} if link is None or link.bits_per_s is None else {"poseidon/slowest_link_bits_per_s": link.bits_per_s}
        return {"poseidon/step_seconds": self.step_s, "poseidon/stall_seconds": self.stall_s, **by_scheme, **rate}

    @property
    def slowest_link(self) -> LinkFigures | None:
        """The link with the lowest rate; None where no rate is known."""
        known = [link for link in self.links if link.bits_per_s is not None]
        return min(known, key=lambda link: link.bits_per_s or 0.0, default=None)


def _checked(kind: type, content: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a class of figures. Texts lose what would change a terminal, for anybody may have written them."""
    checked: dict[str, Any] = {}
    for one in fields(kind):
        if one.name not in content:
            continue  # the class says which one is missing
        value, words = content[one.name], str(one.type)
        if words == "str":
            if not isinstance(value, str):
                raise TypeError(f"{one.name} is no text")
            value = plain(value)
        elif value is not None or "None" not in words:
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(f"{one.name} is no number")
            value = int(value) if words == "int" else float(value)
        checked[one.name] = value
    if unknown := set(content) - set(checked):
        raise ValueError(f"unknown {', '.join(map(repr, sorted(unknown)))}")
    return checked


def plain(text: str) -> str:
    """The text without characters that change a terminal or a line."""
    return "".join(character if character.isprintable() else "?" for character in text)


@dataclass
class _Link:
    acknowledged: int = 0
    busiest_us: int = 0
    round_trip_us: int = 0
    resent: int = 0

    @property
    def is_known(self) -> bool:
        """Whether enough was sent to know a rate."""
        return self.acknowledged >= _LEAST_BYTES and self.busiest_us > 0


class LinkMeter:
    """Rates between one call of `links` and the next."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[int, int]] = {}  # by connection: bytes and µs so far

    def links(self) -> tuple[LinkFigures, ...]:
        """One for each address to which this process has connections beyond itself."""
        return tuple(_figures(peer, link) for peer, link in sorted(self._since_before().items()))

    def sent(self) -> dict[str, tuple[int, float]]:
        """To each of these addresses: the bytes that were acknowledged, and for how many seconds some were not yet.

        Addresses to which too little was sent for a rate are left out.
        """
        known = {peer: link for peer, link in self._since_before().items() if link.is_known}
        return {peer: (link.acknowledged, link.busiest_us / 1e6) for peer, link in known.items()}

    def _since_before(self) -> dict[str, _Link]:
        links: dict[str, _Link] = {}
        now: dict[int, tuple[int, int]] = {}
        for one in _connections():
            acknowledged_before, busy_before_us = self._before.get(one.id, (0, 0))
            now[one.id] = (one.acknowledged_bytes, one.busy_us)
            link = links.setdefault(one.peer_address, _Link())
            link.acknowledged += one.acknowledged_bytes - acknowledged_before
            link.busiest_us = max(link.busiest_us, one.busy_us - busy_before_us)
            link.round_trip_us = max(link.round_trip_us, one.round_trip_us)
            link.resent += one.resent_packets
        self._before = now
        return links


def _figures(peer: str, link: _Link) -> LinkFigures:
    rate = link.acknowledged * 8e6 / link.busiest_us if link.is_known else None
    return LinkFigures(peer, rate, link.round_trip_us / 1e6, link.resent)


def own_addresses() -> list[str]:
    """The addresses that connections of this process have on this machine."""
    return sorted({one.own_address for one in _connections()})


def _connections() -> list[Any]:
    """Poseidon's own connections in this process."""
    from poseidon import _core  # here: who only looks at others, as `poseidon top`, starts faster without it

    return _core.connections()


def _base() -> Path:
    shared_memory = Path("/dev/shm")
    return shared_memory if os.access(shared_memory, os.W_OK) else Path(tempfile.gettempdir())


def place() -> str:
    """Where the files are. Equal for two processes of a machine that see each other's."""
    there = os.stat(_base())
    return f"{there.st_dev} {there.st_ino}"


class Board:
    """A worker's file. A process may have several. Raises OSError where one cannot be made or written."""

    def __init__(self) -> None:
        folder = _base() / f"{_PREFIX}{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if not _is_private(folder, os.getuid()):
            raise PermissionError(f"{folder} belongs to another user, or others may write to it")
        _remove_abandoned(folder)
        # Only the process that made the lock has it: not a data loader, which may outlive its worker.
        self._file, name = tempfile.mkstemp(prefix=f"{_NEW}{os.getpid()}-", dir=folder)
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        made = Path(name)
        self._path = made.rename(made.with_name(made.name.removeprefix(_NEW)))

    def write(self, figures: WorkerFigures) -> None:
        """Replaces what is there."""
        text = json.dumps(vars(figures), default=vars, separators=(",", ":")).encode()
        data = b"%08x\n" % zlib.crc32(text) + text
        os.pwrite(self._file, data, 0)
        os.ftruncate(self._file, len(data))

    def close(self) -> None:
        """Removes the file."""
        self._path.unlink(missing_ok=True)
        os.close(self._file)


def read_boards() -> list[WorkerFigures]:
    """The figures of all workers of this machine that this user may see, by job and rank. Not for a worker itself."""
    found = []
    for folder in _base().glob(f"{_PREFIX}*"):
        uid = folder.name.removeprefix(_PREFIX)
        if not uid.isdigit() or not _is_private(folder, int(uid)):
            continue
        for path in _files(folder):
            with contextlib.suppress(OSError):  # it ends just now
                figures = _read(path, int(uid))
                if figures is not None:
                    found.append(figures)
    return sorted(found, key=lambda one: (one.run_key, one.rank))


def _files(folder: Path) -> Iterator[Path]:
    try:
        names = os.listdir(folder)
    except OSError:  # another user's
        return
    yield from (folder / name for name in names if not name.startswith(_NEW))


def _read(path: Path, uid: int) -> WorkerFigures | None:
    """None where there are no figures yet, or none any more, or the user has put something else there."""
    with _opened(path) as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_uid != uid or _is_abandoned(file.fileno()):
            return None
        for _ in range(_READS):
            file.seek(0)
            digest, _, text = file.read(_MOST_BYTES).partition(b"\n")
            if digest == b"%08x" % zlib.crc32(text):
                return _parsed(text)
    return None


def _parsed(text: bytes) -> WorkerFigures | None:
    """None for what no worker has written: other users' files may be anything."""
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return WorkerFigures.from_json(json.loads(text))
    return None


def _opened(path: Path) -> BinaryIO:
    """The file, without waiting for who may write into a pipe, and without following a link."""
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")


def _remove_abandoned(folder: Path) -> None:
    for path in _files(folder):
        if path.name.startswith(f"{os.getpid()}-"):
            continue  # this process's own: to close it another time would drop its lock
        with contextlib.suppress(OSError), _opened(path) as file:
            if _is_abandoned(file.fileno()):
                path.unlink()


def _is_abandoned(file: int) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_private(folder: Path, uid: int) -> bool:
    with contextlib.suppress(OSError):
        there = folder.lstat()
        return stat.S_ISDIR(there.st_mode) and there.st_uid == uid and there.st_mode & 0o022 == 0
    return False
