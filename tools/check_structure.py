#!/usr/bin/env python3
"""Checks the doors between the rooms (ARCHITECTURE.md) and the house rules that a machine can check.

Prints one line per violation and exits with 1 if there is any.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from structure.circles import check_circles
from structure.contracts import check_cpp_contracts, check_python_contracts
from structure.dead import check_dead_headers, check_dead_modules
from structure.edges import PACKAGE, cpp_edges, python_edges
from structure.report import report
from structure.rooms import CPP_DOORS, PYTHON_DOORS, check_doors, check_rooms_are_listed
from structure.seam import check_kills, check_seam, check_sleeps
from structure.text import check_environment, check_length, check_markdown
from structure.tree import Tree


def violations(tree: Tree) -> Iterator[str]:
    """One line for everything in the tree that breaks a rule."""
    includes, imports = list(cpp_edges(tree)), list(python_edges(tree))
    yield from check_doors(includes, Path("src"), CPP_DOORS)
    yield from check_rooms_are_listed(tree.matching(".cc", ".h", below="src"), Path("src"), CPP_DOORS)
    yield from check_doors(imports, PACKAGE, PYTHON_DOORS)
    yield from check_rooms_are_listed(tree.matching(".py", below=str(PACKAGE)), PACKAGE, PYTHON_DOORS)
    yield from check_circles([*includes, *imports])
    yield from check_dead_modules(tree, imports)
    yield from check_dead_headers(tree, includes)
    yield from check_cpp_contracts(tree)
    yield from check_python_contracts(tree)
    yield from check_length(tree)
    yield from check_markdown(tree)
    yield from check_environment(tree)
    yield from check_seam(tree)
    yield from check_sleeps(tree)
    yield from check_kills(tree)


def main() -> int:
    """Prints all violations; the exit status says whether there are any."""
    return report("structure", list(violations(Tree(Path(__file__).resolve().parent.parent))), "violations")


if __name__ == "__main__":
    sys.exit(main())
