"""Dead files: modules that nobody imports and headers that nobody includes."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from structure.edges import PACKAGE, Edge
from structure.tree import Tree

# Modules that only users, or their tools, import or start.
ENTRY_POINTS = {
    "hook.py",  # of the documentation site; mkdocs.yml names it
    "poseidon.__main__",
    "poseidon.torch.hugging_face",
    "poseidon.torch.lightning",
}


def check_dead_modules(
    tree: Tree, edges: Iterable[Edge], entry_points: Collection[str] = ENTRY_POINTS
) -> Iterator[str]:
    """Python files that no other file imports, starts or names.

    A program, which has a `__main__` block, is alive, and so is what pytest collects. A module of the package that only
    tests import is dead.
    """
    imported: set[Path] = set()
    imported_by_tests: set[Path] = set()
    for edge in edges:
        (imported_by_tests if edge.source.parts[0] == "tests" else imported).add(edge.target)
    named = _named_modules(tree)
    for path in tree.matching(".py"):
        in_package = path.is_relative_to(PACKAGE)
        name = ".".join(["poseidon", *path.relative_to(PACKAGE).with_suffix("").parts]) if in_package else path.name
        alive = (
            path.name in {"__init__.py", "conftest.py"}
            or path.name.startswith("test_")
            or path in imported
            or (path in imported_by_tests and not in_package)
            or {name, path.name} & named
            or name in entry_points
            or (not in_package and _is_program(tree, path))
        )
        if not alive:
            yield f"{path}: nobody imports this module"


def _named_modules(tree: Tree) -> set[str]:
    """All text constants of the Python files outside the tests of the package: modules are started by their names."""
    named: set[str] = set()
    for path in tree.matching(".py"):
        for node in ast.walk(tree.module(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named.add(node.value.rsplit("/", 1)[-1])
    return named


def _is_program(tree: Tree, path: Path) -> bool:
    return any(isinstance(node, ast.If) and "__main__" in ast.dump(node.test) for node in tree.module(path).body)


def check_dead_headers(tree: Tree, edges: Iterable[Edge]) -> Iterator[str]:
    """Headers of src/ that only their own .cc file and tests include, and headers of tests that nobody includes."""
    users: dict[Path, set[Path]] = {}
    for edge in edges:
        users.setdefault(edge.target, set()).add(edge.source)
    for path in [*tree.matching(".h", below="src"), *tree.matching(".h", below="tests")]:
        others = {user for user in users.get(path, ()) if user != path.with_suffix(".cc")}
        if path.parts[0] == "src":
            others = {user for user in others if user.parts[0] != "tests"}
        if not others:
            yield f"{path}: no other file includes this header"
