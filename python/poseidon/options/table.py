"""The rows of include/poseidon/options.def, as the core hands them out."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import Any

from poseidon import _core
from poseidon.errors import InvalidArgument
from poseidon.options.kinds import KINDS, Kind, Limits, format_bytes

PLACE_GROUP = "place"
BASELINES_GROUP = "baselines"


@dataclass(frozen=True)
class Option:
    """One row of the table.

    `default` is None where it depends on the machine; `default_help` then says what it is. `in_core`: `_core.Options`
    has this field. `on_server`: `poseidon server` takes it, too. `decides_chunk_bytes`: which chunk size is the fastest
    depends on it.
    """

    name: str
    kind: Kind
    default: Any
    help: str
    group: str = ""
    limits: Limits = field(default_factory=Limits)
    default_help: str = ""
    in_core: bool = False
    on_server: bool = False
    decides_chunk_bytes: bool = False

    @property
    def variable(self) -> str:
        """The environment variable of this option."""
        name = self.name.upper()
        return name if self.group == PLACE_GROUP else f"POSEIDON_{name}"

    @property
    def flag(self) -> str:
        """The command-line flag of this option."""
        return "--" + self.name.replace("_", "-")

    @property
    def choices(self) -> tuple[str, ...]:
        """The names that are allowed; empty where the value is no name."""
        return tuple(self.limits.choices)

    @property
    def default_text(self) -> str:
        """The default in words; empty where nothing is the default."""
        if self.default is None or self.default in ("", ()):
            return self.default_help
        if self.kind in (KINDS["bytes"], KINDS["bytes_or_auto"]):
            return format_bytes(self.default)
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

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
        if not self.limits.allow(value) or not self.kind.check(value):
            raise self._error(given, origin)
        return self.kind.convert(value)

    def _error(self, value: object, origin: str) -> InvalidArgument:
        hint = ""
        if isinstance(value, str) and (near := difflib.get_close_matches(value, self.choices, n=1)):
            hint = f" (did you mean {near[0]!r}?)"
        allowed = self.kind.allowed(self.limits)
        return InvalidArgument(f"{origin} is {value!r}: it must be {allowed}{hint}; correct it or leave it out")


@dataclass(frozen=True)
class Group:
    """Options that belong together."""

    name: str
    title: str
    help: str


def _option(row: dict[str, Any]) -> Option:
    kind = KINDS[row.pop("kind")]
    limits = Limits(**{name: row.pop(name) for name in ("least", "most", "choices") if name in row})
    default = None if "default_help" in row else kind.convert(row["default"])
    return Option(**{**row, "kind": kind, "limits": limits, "default": default})


_ROWS = tuple(_option(row) for row in _core.option_rows())

# This worker's place in its job, which the launcher tells it.
PLACE = tuple(option for option in _ROWS if option.group == PLACE_GROUP)
OPTIONS = tuple(option for option in _ROWS if option.group != PLACE_GROUP)
CORE_OPTIONS = tuple(option for option in _ROWS if option.in_core)
BY_NAME = {option.name: option for option in OPTIONS}
GROUPS = tuple(Group(name, title, text) for name, (title, text) in _core.option_groups().items())
