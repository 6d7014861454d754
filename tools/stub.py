"""Writes python/poseidon/_core.pyi, the types of the compiled module, or says whether it is current.

Usage: stub.py [--check], in the environment that has the module. nanobind's generator knows the signatures; this adds
what it cannot know, so that mypy accepts the frameworks' arrays and refuses everything else.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from nanobind.stubgen import StubGen

STUB = Path(__file__).resolve().parents[1] / "python" / "poseidon" / "_core.pyi"

# Every array that DLPack can hand over: NumPy's, torch's, JAX's.
ARRAY = '''

class _Array(Protocol):
    """An array in the host's memory, in C order, that DLPack can hand over."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
'''

# Each is a pattern of the generator's text, and what stands in its place.
REPLACEMENTS = [
    (r"(from collections\.abc import \w+\n)import enum\n", r"import enum\n\1"),
    (r"from numpy\.typing import NDArray\n", ""),
    (r"from typing import Annotated\n+", f"from typing import Any, Protocol\n{ARRAY}\n"),
    (r"Annotated\[NDArray, dict\([^)]*\)\]", "_Array"),
    (r"\*\*(kwargs|values)\)", r"**\1: Any)"),
    (r"def __eq__\(self, arg: \w+, /\)", "def __eq__(self, arg: object, /)"),
    (r"-> object:", "-> Any:"),
]


def stub_text() -> str:
    """The stub of the installed module."""
    from poseidon import _core

    generator = StubGen(_core)
    generator.put(_core)
    text = generator.get()
    for pattern, replacement in REPLACEMENTS:
        text, count = re.subn(pattern, replacement, text)
        if count == 0:
            raise SystemExit(f"tools/stub.py: nanobind no longer writes {pattern!r}; mend REPLACEMENTS")
    return text


def main() -> None:
    text = stub_text()
    if sys.argv[1:] == ["--check"]:
        # Only the meaning counts: ruff has formatted the file.
        if ast.dump(ast.parse(text)) != ast.dump(ast.parse(STUB.read_text(encoding="utf-8"))):
            raise SystemExit(f"{STUB.name} is not current: run python tools/stub.py, then make format")
        return
    STUB.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
