"""What a user wants for each parameter of a model, by patterns of names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

from poseidon.errors import InvalidArgument


class Wishes:
    """What the user wants for each parameter, such as its scheme. The first pattern that matches decides.

    Names and patterns have parts with dots between them. A pattern that names a module is for all its parameters.
    Raises InvalidArgument for a value that is not in `known`; `what` is the word for such a value.
    """

    def __init__(self, what: str, known: Collection[str], wish: str | Mapping[str, str] | None, default: str) -> None:
        self._what, self._default, self.known = what, default, known
        self._patterns = dict(wish) if isinstance(wish, Mapping) else {"*": default if wish is None else wish}
        self._unused = set(self._patterns) - {"*"}
        for name in (*self._patterns.values(), default):
            if name not in known:
                raise InvalidArgument(f"{name!r} is no {what}: known are {', '.join(known)}")

    def of(self, names: list[str]) -> str:
        """What is wanted for the parameter with these names."""
        for pattern, wanted in self._patterns.items():
            if pattern == "*" or any(_matches(pattern, name) for name in names):
                self._unused.discard(pattern)
                return wanted
        return self._default

    def check_used(self) -> None:
        """Raises InvalidArgument if a pattern has matched no parameter."""
        if self._unused:
            patterns = ", ".join(sorted(map(repr, self._unused)))
            raise InvalidArgument(f"no parameter or module is called {patterns}: correct the mapping of {self._what}s")


def _matches(pattern: str, name: str) -> bool:
    """Whether `pattern` names the parameter `name` or a module that contains it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))
