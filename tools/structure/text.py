"""The rules for a file's text: its length, its lines, and what may stand only in certain files."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from structure.tree import Tree

MAX_LINES = 499
MAX_COLUMNS = 120


def check_length(tree: Tree) -> Iterator[str]:
    """Source files with too many lines."""
    for path in tree.matching(".py", ".cc", ".h", ".sh"):
        count = len(tree.text(path).splitlines())
        if count > MAX_LINES:
            yield f"{path}: {count} lines, at most {MAX_LINES} are allowed"


def check_markdown(tree: Tree) -> Iterator[str]:
    """Lines of Markdown that are too wide: prose, tables, links and code alike."""
    for path in tree.matching(".md"):
        for number, line in enumerate(tree.text(path).splitlines(), 1):
            if len(line) > MAX_COLUMNS:
                yield f"{path}:{number}: more than {MAX_COLUMNS} columns"


def check_environment(tree: Tree) -> Iterator[str]:
    """Environment variables that are read where they may not be."""
    for path in tree.matching(".cc", ".h"):
        if path.parts[0] in {"src", "include"}:
            for number, line in enumerate(tree.text(path).splitlines(), 1):
                if "getenv" in line:
                    yield f"{path}:{number}: the core reads no environment variables"
    for path in tree.matching(".py", below="python"):
        if path.is_relative_to("python/poseidon/options"):
            continue
        expressions = (node for node in ast.walk(tree.module(path)) if isinstance(node, ast.expr))
        for line_of_read in sorted({node.lineno for node in expressions if _reads_setting(node)}):
            yield f"{path}:{line_of_read}: POSEIDON_* is read in poseidon.options only"


def _reads_setting(node: ast.expr) -> bool:
    """Whether it is environ["POSEIDON_…"], not assigned to, or a call such as environ.get("POSEIDON_…")."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        mapping, key = node.value, node.slice
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        mapping, key = node.func.value, node.args[0]
    else:
        return False
    name = key.value if isinstance(key, ast.Constant) else None
    return ast.unparse(mapping).endswith("environ") and isinstance(name, str) and name.startswith("POSEIDON_")
