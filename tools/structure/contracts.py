"""Contracts: every public name says in a comment or a docstring what a caller may rely on."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from structure.edges import PACKAGE
from structure.tree import Tree

PUBLIC_HEADERS = Path("include/poseidon")
LEAST_WORDS = 2

TYPE = re.compile(r"^(?:template <.*?> )?(?:class|struct|enum class|enum)\b(?:\s*\[\[\w+\]\])? (\w+)[^;(]*\{?$")
FUNCTION = re.compile(r"^(?:template <.*?> )?(?:[\w:<>,&*\[\]]+ )+[&*]*(\w+)\(")
NEEDS_NO_WORDS = re.compile(r"\boperator\b|~\w+\(|= (?:default|delete);$")


def check_cpp_contracts(tree: Tree) -> Iterator[str]:
    """Classes, structs, enums and functions of the public headers that have no comment.

    A comment stands directly above, or behind on the same line. One comment may speak for several declarations that
    follow each other without a blank line. Constructors, destructors, operators and data need none.
    """
    for path in tree.matching(".h", below=str(PUBLIC_HEADERS)):
        for number, name in _without_comment(tree.text(path).splitlines()):
            yield f"{path}:{number}: {name} has no comment"


def _without_comment(lines: list[str]) -> Iterator[tuple[int, str]]:
    """The number of the line and the name of each public type and function without a comment.

    Reads what clang-format has formatted: a declaration begins on a line of its own.
    """
    scopes: list[str] = []  # of the braces that are open: "public", "private", or "body"
    statement, first_line = "", 0
    commented = False  # the line above is a comment, or a declaration that has one
    for number, line in enumerate(lines, 1):
        code, _, comment = line.partition("//")
        code = code.strip()
        if not statement:
            first_line, commented = number, bool(line.strip()) and (commented or bool(comment))
        if not code or code.startswith("#"):
            continue
        if code in {"public:", "private:", "protected:"}:
            scopes[-1], commented = code.removesuffix(":"), False
            continue
        statement = f"{statement} {code}".strip()
        if code[-1] not in ";{}":
            continue
        name = _declared(statement)
        visible = all(scope == "public" for scope in scopes)
        if name and visible and not commented and not comment:
            yield first_line, name
        commented = name is not None and (commented or bool(comment)) and not statement.endswith("{")
        for brace in re.findall(r"[{}]", statement):
            if brace == "{":
                scopes.append(_scope(statement))
            else:
                scopes.pop()
        statement = ""


def _declared(statement: str) -> str | None:
    """The name of the type or function that a statement declares, if it needs a contract."""
    if NEEDS_NO_WORDS.search(statement):
        return None
    match = TYPE.match(statement) or FUNCTION.match(statement)
    return match[1] if match else None


def _scope(statement: str) -> str:
    """What lies behind the brace that a statement opens."""
    if statement.startswith("namespace"):
        return "public"
    match = TYPE.match(statement)
    if match is None or statement.startswith("enum"):
        return "body"
    return "private" if "class " in statement.split(match[1])[0] else "public"


def check_python_contracts(tree: Tree) -> Iterator[str]:
    """Public modules, classes, functions and methods of the package whose docstring is missing or no sentence.

    A method of a derived class may stand under the contract of its base class.
    """
    for path in tree.matching(".py", below=str(PACKAGE)):
        for line, name, docstring in _public_names(tree.module(path), path.stem):
            if docstring is None:
                yield f"{path}:{line}: {name} has no docstring"
            elif not _is_sentence(docstring):
                yield f"{path}:{line}: the docstring of {name} does not begin with a full sentence"


def _public_names(module: ast.Module, name: str) -> Iterator[tuple[int, str, str | None]]:
    yield 1, name, ast.get_docstring(module)
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.lineno, node.name, ast.get_docstring(node)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for method in node.body:
                if not isinstance(method, ast.FunctionDef) or method.name.startswith("_"):
                    continue
                docstring = ast.get_docstring(method)
                if docstring is not None or not (node.bases or _has_decorator(method, "setter", "overload")):
                    yield method.lineno, f"{node.name}.{method.name}", docstring


def _has_decorator(function: ast.FunctionDef, *names: str) -> bool:
    return any(ast.unparse(decorator).rsplit(".", 1)[-1] in names for decorator in function.decorator_list)


def _is_sentence(docstring: str) -> bool:
    """Whether the first paragraph has the outer form of a sentence: some words, a capital, a full stop."""
    first = docstring.split("\n\n")[0].strip()
    return len(first.split()) >= LEAST_WORDS and not first[0].islower() and first.endswith((".", "?", "!", ":"))
