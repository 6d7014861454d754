#!/usr/bin/env python3
"""Lists the headers' sentences about threads that nothing checks (docs/decisions/0062-checked-threads.md).

A sentence such as "Only the loop's thread uses it" belongs to the class above which it stands, or in which. The class
is checked if it uses OneThread, Loop::check_thread, Loop::checked, Loop::check_other_thread or Loop::in_loop_thread in
its own definition, or in a definition of one of its members in a file of the same directory. The sentence may also name
in brackets who checks it: "(Shard checks it)", or "(those that derive from it check it)". Each of these has to be
checked.

Prints one line for each sentence without a check, and exits with 1 if there is any.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from structure.report import report
from structure.tree import Tree

HEADERS = ("src", "include")
IMPLEMENTATION = Path("src/base/one_thread.h")
SENTENCE = re.compile(
    r"\b(?:only|one)\b[^.;:]*\b(?:thread|loop)\b[^.;:]*\b(?:uses?|calls?|at a time)\b"
    r"|\bnot thread-safe\b|\bany thread but\b|\bthread must not call\b",
    re.IGNORECASE,
)
CHECK = re.compile(r"\bOneThread\b|\bcheck_thread\(|\bchecked\(|\bcheck_other_thread\(|\bin_loop_thread\(")
CHECKER = re.compile(r"\(([^()]*?) checks? it\b[^()]*\)")
DERIVED = "those that derive from it"
CLASS = re.compile(
    r"^[ \t]*(?:class|struct) (?:\w+::)*(\w+)(?: final)?(?:\s*:\s*(?P<bases>[^{};]+))?\s*\{", re.MULTILINE
)
COMMENT = re.compile(r"//+(.*)$")


@dataclass(frozen=True)
class Class:
    """A class of the core, with what its file has between its braces."""

    name: str
    path: Path
    begin: int
    end: int
    body: str
    bases: frozenset[str]


class Classes:
    """All classes of the core, and which of them have a check."""

    def __init__(self, tree: Tree) -> None:
        paths = [path for root in HEADERS for path in tree.matching(".h", ".cc", below=root)]
        self._code = {path: _without_comments(tree.text(path)) for path in paths}
        self.all = [found for path in paths for found in _classes(path, self._code[path])]

    def at(self, path: Path, begin: int, end: int) -> Class | None:
        """The class to which a comment belongs: the one that begins right after it, or the innermost around it."""
        of_file = [one for one in self.all if one.path == path]
        code = self._code[path]
        for one in of_file:
            if begin < one.begin and re.fullmatch(r"\s*(?:template <[^\n]*>\s*)?", code[end : one.begin]):
                return one
        around = [one for one in of_file if one.begin < begin < one.end]
        return max(around, key=lambda one: one.begin, default=None)

    def checked(self, one: Class) -> bool:
        """Whether the class, or one of its members' definitions in the same directory, has a check."""
        if CHECK.search(one.body):
            return True
        member = re.compile(rf"^(?!\s)[^\n;]*\b{one.name}::~?\w+\(.*?(?:\}}$|^\}})", re.MULTILINE | re.DOTALL)
        return any(
            CHECK.search(definition)
            for path, code in self._code.items()
            if path.parent == one.path.parent
            for definition in member.findall(code)
        )

    def unchecked_of(self, one: Class, sentence: str) -> list[str]:
        """The names of those that would have to check the sentence, and do not."""
        named = CHECKER.search(sentence)
        if named is None:
            return [] if self.checked(one) else [one.name]
        if named[1] == DERIVED:
            derived = [other for other in self.all if one.name in other.bases]
            return [other.name for other in derived if not self.checked(other)] if derived else [one.name]
        names = re.split(r", | and ", named[1])
        return [name for name in names if not any(self.checked(other) for other in self.all if other.name == name)]


def violations(tree: Tree) -> Iterator[str]:
    """One line for each sentence about threads whose class has no check."""
    classes = Classes(tree)
    for root in HEADERS:
        for path in tree.matching(".h", below=root):
            if path == IMPLEMENTATION:
                continue
            for begin, end, text in _comments(tree.text(path)):
                one = classes.at(path, begin, end)
                for sentence in re.split(r"(?<=\.) ", text):
                    if one is None or not SENTENCE.search(sentence):
                        continue
                    for name in classes.unchecked_of(one, sentence):
                        line = tree.text(path).count("\n", 0, begin) + 1
                        yield f"{path}:{line}: {name} does not check: {sentence.strip()}"


def _without_comments(text: str) -> str:
    """The text with spaces in the place of comments, so that offsets stay."""
    return re.sub(r"//[^\n]*", lambda comment: " " * len(comment[0]), text)


def _classes(path: Path, code: str) -> Iterator[Class]:
    for match in CLASS.finditer(code):
        depth, end = 1, match.end()
        while depth > 0:
            depth += {"{": 1, "}": -1}.get(code[end], 0)
            end += 1
        bases = re.findall(r"(\w+)\s*(?:<[^<>]*>)?\s*(?:,|$)", match["bases"] or "")
        yield Class(match[1], path, match.start(), end, code[match.end() : end], frozenset(bases))


def _comments(text: str) -> Iterator[tuple[int, int, str]]:
    """Begin, end and words of each comment. Lines with nothing but a comment that follow each other are one."""
    block: list[str] = []
    first = last = offset = 0
    for line in text.splitlines(keepends=True):
        comment = COMMENT.search(line)
        alone = comment is not None and not line[: comment.start()].strip()
        if block and not alone:
            yield first, last, " ".join(block)
            block = []
        if comment is not None:
            if not alone:
                yield offset + comment.start(), offset + len(line), comment[1].strip()
            else:
                first = first if block else offset
                block.append(comment[1].strip())
                last = offset + len(line)
        offset += len(line)
    if block:
        yield first, last, " ".join(block)


def main() -> int:
    """Prints all sentences without a check; the exit status says whether there are any."""
    return report(
        "threads", list(violations(Tree(Path(__file__).resolve().parent.parent))), "sentences without a check"
    )


if __name__ == "__main__":
    sys.exit(main())
