"""The texts of errors in the C++ core, put together from its sources as the core does.

That takes the pieces of a sum or of concat(), the values of variables, and what functions add to what their callers
give. {} stands for what is known only at run time.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_TOKEN = re.compile(
    r"(?P<comment>//[^\n]*|/\*.*?\*/)|\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)'|\w+|::|->|[^\s\w]", re.DOTALL
)
_PAIRS = {"(": ")", "[": "]", "{": "}"}
_STATEMENTS = {"if", "for", "while", "switch", "catch"}
_TYPES = {"string", "string_view", "auto", "*"}  # the last words of a text's type
_PASSED_ON = {"string", "string_view", "move"}  # std::move(text) and the like are the text
_HOLE = re.compile("\0(\\d+)\0")  # a parameter of the function that builds the text
_MOST_VARIANTS = 16
_MOST_CALLS = 4  # from one function that adds to a text to the next


@dataclass(frozen=True)
class Function:
    """A function or a named lambda: what its callers give may be part of a text."""

    name: str
    parameters: tuple[str, ...]
    body: tuple[int, int]  # the tokens between its braces
    gives: str  # the last word of its type
    seen: tuple[int, int] | None  # the tokens that see it: of a lambda's block, or of its file; None: other files, too


class Source:
    """The tokens of a C++ file."""

    def __init__(self, place: str, text: str) -> None:
        self.place = place
        self.tokens = [match[0] for match in _TOKEN.finditer(text) if match["comment"] is None]
        self.partner: dict[int, int] = {}  # of each bracket
        self._returning: list[Function] = []
        self.library: dict[str, tuple[Source, Function]] = {}  # what returns texts in other files of its room
        opened: list[int] = []
        for at, token in enumerate(self.tokens):
            if token in _PAIRS:
                opened.append(at)
            elif opened and token == _PAIRS[self.tokens[opened[-1]]]:
                self.partner[at] = opened[-1]
                self.partner[opened.pop()] = at

    @cached_property
    def functions(self) -> list[Function]:
        """Inner ones come after those around them."""
        return [found for at, token in enumerate(self.tokens) if token == "{" and (found := self._function(at))]

    def _function(self, at: int) -> Function | None:
        end = at - 1
        while self.tokens[end] in ("const", "noexcept", "override", "mutable"):
            end -= 1
        start = self.partner.get(end, 0)
        if self.tokens[end] != ")" or start < 4 or at not in self.partner:
            return None
        name = self.tokens[start - 1]
        nameless = any(first < at < self.partner[first] for first in self._nameless)
        seen = (0, len(self.tokens)) if nameless else None
        if name == "]":  # auto name = [...](...) {...}
            start_of_lambda = self.partner[start - 1]
            name = self.tokens[start_of_lambda - 2] if self.tokens[start_of_lambda - 1] == "=" else ""
            block = max(one for one in self.partner if self.tokens[one] == "{" and one < at < self.partner[one])
            seen = (block, self.partner[block])
        if name in _STATEMENTS:
            return None
        parameters = tuple(self._parameter(*one) for one in self.split(start + 1, end, ","))
        word = start - 2
        while self.tokens[word] == "::":
            word -= 2
        return Function(name, parameters, (at + 1, self.partner[at]), self.tokens[word], seen)

    @cached_property
    def _nameless(self) -> list[int]:
        return [at + 1 for at in range(len(self.tokens) - 1) if self.tokens[at : at + 2] == ["namespace", "{"]]

    def _parameter(self, start: int, end: int) -> str:
        before_default = self.split(start, end, "=")[0][1]
        return self.tokens[before_default - 1] if before_default > start else ""

    def split(self, start: int, end: int, sign: str) -> list[tuple[int, int]]:
        """The parts of an expression between signs that stand outside its brackets."""
        parts = []
        at = begun = start
        while at < end:
            if self.tokens[at] == sign:
                parts.append((begun, at))
                begun = at + 1
            at = self.partner.get(at, at) + 1 if self.tokens[at] in _PAIRS else at + 1
        return [*parts, (begun, end)]

    def end_of(self, at: int, signs: str) -> int:
        """Where an expression ends: at one of the signs, or at the bracket around it."""
        while at < len(self.tokens) and self.tokens[at] not in signs and self.tokens[at] not in _PAIRS.values():
            at = self.partner.get(at, at) + 1 if self.tokens[at] in _PAIRS else at + 1
        return at

    def around(self, at: int) -> list[Function]:
        """The functions in whose bodies the token is, inner ones first."""
        return [one for one in reversed(self.functions) if one.body[0] <= at < one.body[1]]

    def texts(self, start: int, end: int) -> list[str]:
        """What the expression can be."""
        asked, *ways = self.split(start, end, "?")
        if ways:
            first, *others = self.split(asked[1] + 1, end, ":")
            return [*self.texts(*first), *(self.texts(others[0][0], end) if others else [])]
        if self.tokens[start : start + 2] == ["concat", "("] and self.partner[start + 1] == end - 1:
            return _joined(self._part(*one) for one in self.split(start + 2, end - 1, ","))
        if called := self._called(start, end):
            return called[0].returned(called[1])
        return self._sum(start, end)

    def _part(self, start: int, end: int) -> list[str]:
        """What an argument of concat() can be."""
        chosen = len(self.split(start, end, "?")) > 1
        return self.texts(start, end) if chosen else self._sum(start, end)

    def _sum(self, start: int, end: int) -> list[str]:
        return _joined(self._piece(*one) for one in self.split(start, end, "+"))

    def _piece(self, start: int, end: int) -> list[str]:
        tokens = self.tokens[start:end]
        if tokens and all(token.startswith('"') for token in tokens):
            return ["".join(token[1:-1] for token in tokens).replace('\\"', '"').replace("\\n", "\n")]
        called = end - 1 if tokens and tokens[-1] == ")" else None
        opened = self.partner[called] if called is not None else start
        if opened == start + 1 and tokens[0] == "concat":
            return self.texts(start, end)
        if opened == start and called is not None:
            return self.texts(start + 1, called)
        if called is not None and self.tokens[opened - 1] in _PASSED_ON and opened - start <= 3:
            return self.texts(opened + 1, called)
        return self._named(tokens[0], start) if len(tokens) == 1 else ["{}"]

    def _named(self, name: str, at: int) -> list[str]:
        """What a variable was given where it was declared, or the hole of a parameter."""
        for function in self.around(at):
            if name in function.parameters:
                return [f"\0{function.body[0]}{function.parameters.index(name):02}\0"]
            for declared in range(at - 1, function.body[0], -1):
                before, word, after = self.tokens[declared - 1 : declared + 2]
                if word == name and after == "=" and before in _TYPES:
                    return self.texts(declared + 2, self.end_of(declared + 2, ";,"))
        return self._constants.get(name, ["{}"])

    @cached_property
    def _constants(self) -> dict[str, list[str]]:
        """The texts that the file gives names to: constexpr const char* kName = ..."""
        found = [at for at in range(len(self.tokens) - 1) if self.tokens[at : at + 2] == ["char", "*"]]
        named = [at + 2 for at in found if self.tokens[at + 3] == "=" and self.tokens[at + 4].startswith('"')]
        return {self.tokens[at]: self.texts(at + 2, self.end_of(at + 2, ";")) for at in named}

    def _called(self, start: int, end: int) -> tuple[Source, Function] | None:
        """The function whose call is the whole expression: it returns whole texts."""
        opened = self.partner.get(end - 1, start)
        before = self.tokens[start : opened - 1]
        if opened <= start or any(not token.isidentifier() and token not in ("->", ".", "::") for token in before):
            return None
        name = self.tokens[opened - 1]
        found = (one for one in self.functions if one.name == name and one not in self.around(start))
        own = next(found, None)
        return (self, own) if own else self.library.get(name)

    def gives_text(self, function: Function) -> bool:
        """Whether others can call it, and it returns a std::string."""
        return function.gives == "string" and function.seen is None

    def returned(self, function: Function) -> list[str]:
        """What the function can return, for any arguments."""
        if function in self._returning:  # it calls itself
            return ["{}"]
        start, end = function.body
        returns = [at + 1 for at in range(start, end) if self.tokens[at] == "return"]
        self._returning.append(function)
        texts = [_HOLE.sub("{}", text) for at in returns for text in self.texts(at, self.end_of(at, ";"))]
        self._returning.pop()
        return [text for text in texts if text] or ["{}"]


class Core:
    """All files of the core."""

    def __init__(self, root: Path) -> None:
        paths = sorted(path for path in (root / "src").rglob("*") if path.suffix in (".cc", ".h"))
        self.sources = [Source(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")) for path in paths]
        for source in self.sources:
            for other in self._room_of(source):
                source.library |= {one.name: (other, one) for one in other.functions if other.gives_text(one)}

    def messages(self) -> Iterator[tuple[str, str, str]]:
        """Place, code and text of each that has words."""
        for source in self.sources:
            for at in range(len(source.tokens) - 4):
                if source.tokens[at : at + 2] != ["ErrorCode", "::"] or source.tokens[at + 3] != ",":
                    continue
                texts = source.texts(at + 4, source.end_of(at + 4, ",;"))
                for place, text in self._complete(source, texts, _MOST_CALLS):
                    if re.search(r"\w", text):
                        yield place, source.tokens[at + 2], re.sub(r"(\{\})+", "{}", text)

    def _complete(self, source: Source, texts: Iterable[str], most_calls: int) -> Iterator[tuple[str, str]]:
        """With what callers give for the holes."""
        for text in texts:
            holes = {int(hole[:-2]) for hole in _HOLE.findall(text)}
            functions = [one for one in source.functions if one.body[0] in holes]
            calls = list(self._calls(source, functions[-1], text)) if functions and most_calls else []
            if not calls:
                yield source.place, _HOLE.sub("{}", text)
            for caller, filled in calls:
                yield from self._complete(caller, [filled], most_calls - 1)

    def _calls(self, source: Source, function: Function, text: str) -> Iterator[tuple[Source, str]]:
        """The text with the arguments of each call, if one of them has words."""
        for caller in [source] if function.seen else self._room_of(source):
            if caller is not source and any(one.name == function.name for one in caller.functions):
                continue
            for at in range(*(function.seen or (0, len(caller.tokens) - 1))):
                if caller.tokens[at] != function.name or caller.tokens[at + 1] != "(" or at + 1 not in caller.partner:
                    continue
                arguments = [caller.texts(*one) for one in caller.split(at + 2, caller.partner[at + 1], ",")]
                for given in itertools.islice(itertools.product(*arguments), _MOST_VARIANTS):
                    filled = _fill(text, function, given)
                    if filled is not None:
                        yield caller, filled

    def _room_of(self, source: Source) -> list[Source]:
        room = source.place.split("/")[1]
        return [one for one in self.sources if one.place.split("/")[1] == room]


def _joined(parts: Iterable[list[str]]) -> list[str]:
    """All texts that take one of each part's variants."""
    return ["".join(one) for one in itertools.islice(itertools.product(*parts), _MOST_VARIANTS)]


def _fill(text: str, function: Function, given: tuple[str, ...]) -> str | None:
    """None if the arguments add no clause to the text."""
    own = {f"{function.body[0]}{i:02}": value for i, value in enumerate(given)}
    used = [own[hole] for hole in _HOLE.findall(text) if hole in own]
    if not any(re.search(r"[\w}'] [\w{']", value) for value in used):
        return None
    return _HOLE.sub(lambda hole: own.get(hole[1], "{}"), text)
