"""Every message of an error that a user can meet, read from the sources: raised in Python, or a Status in C++."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from core_texts import Core

ROOT = Path(__file__).resolve().parents[2]
ERRORS = {
    "PoseidonError",
    "InvalidArgument",
    "Mismatch",
    "PeerLost",
    "PoseidonTimeout",
    "Refused",
    "ShutDown",
    "Unreachable",
    "Aborted",
    "Evicted",
}


@dataclass(frozen=True)
class Message:
    """`text` has {} for each value."""

    place: str  # its file
    kind: str
    text: str


def python_messages() -> Iterator[Message]:
    """Those whose text stands where they are raised."""
    for path in sorted((ROOT / "python" / "poseidon").rglob("*.py")):
        place = path.relative_to(ROOT).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        words = dict(_words(tree))
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in ERRORS:
                continue
            if node.args and (text := _text(node.args[0], words)).strip("{} "):
                yield Message(place, node.func.id, text)


def _words(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The texts that a module gives names to."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from ((target.id, node.value.value) for target in node.targets if isinstance(target, ast.Name))


def _text(node: ast.expr, words: dict[str, str]) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, words) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left, words) + _text(node.right, words)
    if isinstance(node, ast.FormattedValue):
        return _text(node.value, words)
    return words.get(node.id, "{}") if isinstance(node, ast.Name) else "{}"


def core_messages() -> list[Message]:
    """Those of the C++ core."""
    return list(dict.fromkeys(Message(*one) for one in Core(ROOT).messages()))
