"""The kinds of options that include/poseidon/options.def names: how text is read, and what is said when that fails."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

AUTO = "auto"
OFF = "off"
MOST_WHOLE = 2**31 - 1  # where a row gives no upper bound

_SIZE_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _SIZE_UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}


def parse_bytes(text: str) -> int:
    """Bytes that `text` stands for: "65536", "512k" (= 512 KiB), "2MiB", "2MB" (= 2 000 000).

    Raises ValueError when it is not a whole number of bytes.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    unit = _SIZE_UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is no size")
    size = float(match[1]) * unit if "." in match[1] else int(match[1]) * unit
    if size != int(size):
        raise ValueError(f"{text!r} is no whole number of bytes")
    return int(size)


def format_bytes(size_bytes: int) -> str:
    """The size as users write it: "256KiB", "1MiB", "100"."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes and size_bytes % unit == 0:
            return f"{size_bytes // unit}{name}"
    return str(size_bytes)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_whole(value) or isinstance(value, float)


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)


def _parse_list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _parse_bytes_or_auto(text: str) -> int | str:
    return AUTO if text.strip() == AUTO else parse_bytes(text)


def _parse_auto_off_or_whole(text: str) -> int | str:
    return text.strip() if text.strip() in (AUTO, OFF) else int(text)


def _is_address(text: str) -> bool:
    host, colon, port = text.rpartition(":")
    return bool(colon and host and port.isdigit() and 1 <= int(port) <= 65535)


def _is_replica_place(text: str) -> bool:
    try:
        return not text or bool(ReplicaPlace.of(text))
    except ValueError:
        return False


def _is_threshold(text: str) -> bool:
    try:
        return text in (AUTO, "coarse") or 0 <= float(text) <= 1
    except ValueError:
        return False


@dataclass(frozen=True)
class ReplicaPlace:
    """Which replica a process belongs to, of how many, and where all replicas meet."""

    number: int
    count: int
    host: str
    port: int

    @staticmethod
    def of(text: str) -> ReplicaPlace:
        """That of a text such as 0/4@10.0.0.1:29400. Raises ValueError."""
        match = re.fullmatch(r"(\d+)/(\d+)@(.+):(\d+)", text)
        if match is None or not _is_address(f"{match[3]}:{match[4]}") or int(match[1]) >= int(match[2]):
            raise ValueError(f"{text!r} is no replica's place")
        return ReplicaPlace(int(match[1]), int(match[2]), match[3], int(match[4]))


@dataclass(frozen=True)
class Limits:
    """What a row says of the values that are allowed: inclusive bounds, or names, each with a sentence on it."""

    least: float | None = None
    most: float | None = None
    choices: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> dict[str, str]:
        """The names that are allowed as users read them, each with its sentence."""
        return {name or '""': text for name, text in self.choices.items()}

    def allow(self, value: Any) -> bool:
        """Whether `value` is one of the names, or within the bounds if it is a number."""
        if self.choices:
            return value in self.choices
        if self.least is None or self.most is None or isinstance(value, str):
            return True
        return bool(self.least <= value <= self.most)


def _allowed_whole(limits: Limits) -> str:
    if limits.most == MOST_WHOLE:
        return f"a whole number, {limits.least} or more"
    return f"a whole number from {limits.least} to {limits.most}"


def _allowed_bytes(limits: Limits) -> str:
    least = f" of at least {limits.least} bytes" if limits.least else ""
    return f"a size{least} such as 65536, 512k or 2MiB" + ("" if limits.least else ", or 0")


def _as_given(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Kind:
    """A type of option.

    `parse` reads text and raises ValueError. `accepts` says whether a Python value that is no text is of the type,
    and `convert` makes the value of the setting from what either gives. `check` says whether that is allowed, beside
    the limits of the row. `allowed` completes the sentence "it must be …". `to_core` makes the value
    that `_core.Options` takes.
    """

    metavar: str
    parse: Callable[[str], Any]
    accepts: Callable[[Any], bool]
    allowed: Callable[[Limits], str]
    check: Callable[[Any], bool] = lambda value: True
    convert: Callable[[Any], Any] = _as_given
    to_core: Callable[[Any], Any] = _as_given


def _text(metavar: str, allowed: str, check: Callable[[Any], bool] = lambda value: True) -> Kind:
    return Kind(metavar, str, _is_text, lambda limits: allowed, check)


def _list(allowed: str, check: Callable[[str], bool], to_core: Callable[[str], Any] = str) -> Kind:
    return Kind(
        "A,B,…",
        _parse_list,
        _is_list,
        lambda limits: allowed,
        check=lambda items: all(map(check, items)),
        convert=tuple,
        to_core=lambda items: [to_core(item) for item in items],
    )


def _number(metavar: str, what: str) -> Kind:
    def allowed(limits: Limits) -> str:
        return f"a number {what}from {limits.least:.15g} to {limits.most:.15g}"

    return Kind(metavar, float, _is_number, allowed, convert=float)


KINDS = {
    "whole": Kind("N", int, _is_whole, _allowed_whole),
    "port": Kind("PORT", int, _is_whole, lambda limits: f"a port from {limits.least} to {limits.most}"),
    "number": _number("X", ""),
    "seconds": _number("SECONDS", "of seconds "),
    "bytes": Kind("BYTES", parse_bytes, _is_whole, _allowed_bytes),
    "bytes_or_auto": Kind(
        "BYTES|auto",
        _parse_bytes_or_auto,
        _is_whole,
        lambda limits: f"auto, or {_allowed_bytes(limits)}",
        to_core=lambda value: 0 if value == AUTO else value,
    ),
    "auto_off_or_whole": Kind(
        "N|auto|off",
        _parse_auto_off_or_whole,
        _is_whole,
        lambda limits: f"auto, off, or {_allowed_whole(limits)}",
        to_core=str,
    ),
    "choice": Kind("TEXT", str, _is_text, lambda limits: "one of " + ", ".join(limits.names)),
    "threshold": _text("TEXT", "auto, coarse or a number from 0 to 1", _is_threshold),
    "host": _text("HOST", "the name or address of a machine", bool),
    "replica_place": _text("I/N@HOST:PORT", "number/count@host:port, such as 0/4@10.0.0.1:29400", _is_replica_place),
    "path": _text("PATH", "the path of a file or directory"),
    "path_or_off": Kind(
        "PATH|off",
        str,
        _is_text,
        lambda limits: "a directory, or off",
        check=bool,
        to_core=lambda value: "" if value == OFF else value,
    ),
    "job_name": _text(
        "TEXT",
        "1 to 64 letters, digits, '.', '_' or '-'",
        lambda value: re.fullmatch(r"[\w.-]{1,64}", value) is not None,
    ),
    "label": _text(
        "TEXT",
        "up to 64 letters, digits, '.', '_' or '-'",
        lambda value: re.fullmatch(r"[\w.-]{0,64}", value) is not None,
    ),
    "list": _list("a list of addresses or devices separated by commas", bool),
    "addresses": _list("a list of host:port separated by commas", _is_address),
    "code_points": _list(
        "a list of numbers from 0 to 63 separated by commas, one for each of priority_classes",
        lambda mark: mark.isdigit() and int(mark) < 64,
        int,
    ),
}
