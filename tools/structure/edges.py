"""Who imports whom: the imports of Python and the includes of C++, as edges between files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from structure.tree import Tree

PACKAGE = Path("python/poseidon")
# The compiled extension has no source file in the package.
EXTENSION = PACKAGE / "_core.py"
INCLUDE = re.compile(r'^\s*#\s*include "([^"]+)"', re.MULTILINE)
# The folders that CMakeLists.txt gives to the compiler.
INCLUDE_FOLDERS = (Path("src"), Path("include"), Path("tests"))


@dataclass(frozen=True)
class Edge:
    """One import or include."""

    source: Path
    target: Path
    line: int  # in the source

    def __str__(self) -> str:
        return f"{self.source}:{self.line}"


def python_edges(tree: Tree) -> Iterator[Edge]:
    """Every import of another Python file of the tree, also those for type checking and those inside functions."""
    known = {*tree.matching(".py"), EXTENSION}
    for path in tree.matching(".py"):
        for node in ast.walk(tree.module(path)):
            if isinstance(node, ast.Import):
                targets = {_python_file(alias.name.split("."), path, known) for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                targets = _imported_from(node, path, known)
            else:
                continue
            for target in sorted(target for target in targets if target not in (None, path)):
                yield Edge(path, target, node.lineno)


def _imported_from(node: ast.ImportFrom, path: Path, known: set[Path]) -> set[Path | None]:
    """The files that `from M import a, b` names: the modules a and b, or M where they are none."""
    module = (node.module or "").split(".") if node.module else []
    if node.level:
        folder = path.parents[node.level - 1]
        return {_module_file(folder.joinpath(*module, alias.name), known) for alias in node.names} or {
            _module_file(folder.joinpath(*module), known)
        }
    return {
        _python_file([*module, alias.name], path, known) or _python_file(module, path, known) for alias in node.names
    }


def _python_file(name: list[str], path: Path, known: set[Path]) -> Path | None:
    """The file of an absolute module name, as seen by `path`: in the package, or in a script's folder or one above."""
    if name[0] == "poseidon":
        return _module_file(PACKAGE.joinpath(*name[1:]), known)
    if path.is_relative_to(PACKAGE):  # which imports itself by its whole name: `torch` is not poseidon/torch
        return None
    folders = [*path.parents, Path("tools")]
    return next(filter(None, (_module_file(folder.joinpath(*name), known) for folder in folders)), None)


def _module_file(stem: Path, known: set[Path]) -> Path | None:
    for candidate in (stem.parent / f"{stem.name}.py", stem / "__init__.py"):
        if candidate in known:
            return candidate
    return None


def cpp_edges(tree: Tree) -> Iterator[Edge]:
    """Every include of another file of the tree."""
    known = set(tree.matching(".h", ".cc"))
    for path in sorted(known):
        text = tree.text(path)
        for match in INCLUDE.finditer(text):
            folders = (path.parent, *INCLUDE_FOLDERS)
            target = next((folder / match[1] for folder in folders if folder / match[1] in known), None)
            if target is not None:
                yield Edge(path, target, text.count("\n", 0, match.start(1)) + 1)
