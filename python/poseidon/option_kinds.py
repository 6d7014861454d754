"""What a row of the table of options is: its type, how its text is read and what is said when that fails."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from poseidon.errors import InvalidArgument

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


@dataclass(frozen=True)
class Kind:
    """A type of option: how its text is read and what is said when that fails."""

    metavar: str
    parse: Callable[[str], Any]  # raises ValueError
    accepts: Callable[[Any], bool]  # is this Python value, not text, of the type?


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _parse_list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


AUTO = "auto"


def _parse_size_or_auto(text: str) -> int | str:
    return AUTO if text.strip() == AUTO else parse_bytes(text)


TEXT = Kind("TEXT", str, lambda value: isinstance(value, str))
INTEGER = Kind("N", int, _is_int)
SECONDS = Kind("SECONDS", float, lambda value: _is_int(value) or isinstance(value, float))
NUMBER = Kind("X", float, SECONDS.accepts)
BYTES = Kind("BYTES", parse_bytes, _is_int)
SIZE_OR_AUTO = Kind("BYTES|auto", _parse_size_or_auto, _is_int)
LIST = Kind(
    "A,B,…",
    _parse_list,
    lambda value: isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value),
)


@dataclass(frozen=True)
class Option:
    """One row of the table. `allowed` completes the sentence "it must be …"."""

    name: str
    kind: Kind
    default: Any
    help: str
    allowed: str
    choices: tuple[str, ...] = ()
    check: Callable[[Any], bool] = lambda value: True

    @property
    def variable(self) -> str:
        """The environment variable of this option."""
        return f"POSEIDON_{self.name.upper()}"

    @property
    def flag(self) -> str:
        """The command-line flag of this option."""
        return "--" + self.name.replace("_", "-")

    def read(self, given: Any, origin: str) -> Any:
        """The value that `given` (text or already typed) stands for; `origin` names its giver in the error."""
        value = given
        if isinstance(given, str):
            try:
                value = self.kind.parse(given)
            except ValueError:
                raise self._error(given, origin) from None
        elif not self.kind.accepts(given):
            raise self._error(given, origin)
        if (self.choices and value not in self.choices) or not self.check(value):
            raise self._error(given, origin)
        if self.kind in (SECONDS, NUMBER):
            return float(value)
        return tuple(value) if self.kind is LIST else value

    def _error(self, value: object, origin: str) -> InvalidArgument:
        hint = ""
        if isinstance(value, str) and (near := difflib.get_close_matches(value, self.choices, n=1)):
            hint = f" (did you mean {near[0]!r}?)"
        return InvalidArgument(f"{origin} is {value!r}: it must be {self.allowed}{hint}; correct it or leave it out")


def choice(name: str, default: str, choices: tuple[str, ...], text: str) -> Option:
    """An option that is one of a few words."""
    return Option(name, TEXT, default, text, "one of " + ", ".join(choices), choices)


def size(name: str, default: int, least: int, text: str) -> Option:
    """An option that is a number of bytes, at least `least` and at most 16 GiB."""
    allowed = f"a size of at least {least} bytes such as 65536, 512k or 2MiB"
    return Option(name, BYTES, default, text, allowed, check=lambda value: least <= value <= 1 << 34)
