#!/usr/bin/env python3
"""Checks the doors between the rooms (ARCHITECTURE.md) and the house rules that a machine can check.

Prints one line per violation and exits with 1 if there is any.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 500

# Which rooms a room of src/ may include, besides itself and the public headers.
DOORS: dict[str, set[str]] = {
    "base": set(),
    "kernel": {"base"},
    "plan": {"base"},
    "wire": {"base"},
    "transport": {"base", "wire"},
    "rendezvous": {"base", "wire", "transport"},
    "scheme": {"base", "plan", "wire", "kernel", "transport"},
    "server": {"base", "plan", "wire", "kernel", "transport"},
    "client": {"base", "scheme", "plan", "wire", "transport", "rendezvous"},
    "worker": {"base", "client", "server", "wire", "transport", "rendezvous"},
    "bindings": set(),
}

# Which inner rooms an inner room of src/ may include, besides itself. The files of the outer room may include them all.
INNER_DOORS: dict[str, set[str]] = {
    "server/chunk": set(),
    "server/pace": {"server/chunk"},
    "server/checkpoint": {"server/chunk"},
    "server/core": {"server/chunk", "server/pace", "server/checkpoint"},
}

# Which packages of python/poseidon a package may import. What is not listed may import anything.
PYTHON_DOORS: dict[str, set[str]] = {
    "errors": set(),
    "dscp": set(),
    "option_kinds": {"errors"},
    "option_table": {"dscp", "option_kinds"},
    "secret": {"errors"},
    "slurm": {"errors"},
    "options": {"errors", "dscp", "option_kinds", "option_table", "secret", "slurm", "_core"},
    "failure_marks": {"errors", "options"},
    "chunk_cache": {"options", "_core"},
    "notices": {"_core"},
    "restore": {"errors", "_core"},
    "exchange": {"errors", "options", "chunk_cache", "notices", "restore", "torch", "_core"},
    "torch": {"errors", "options", "chunk_cache", "failure_marks", "notices", "restore", "_core"},
    "models": {"errors"},
    "report": {"errors", "torch"},
    "testbed": {"errors", "dscp"},
    "doctor": {"errors"},
}

INCLUDE = re.compile(r'^#include "([a-z_]+)/')
IMPORT = re.compile(r"^\s*(?:from|import) poseidon(?:\.([a-z_]+)|\s+import\s+([a-z_]+))")


def tracked(*patterns: str) -> list[Path]:
    """Files that git knows or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).exists()]


def check_doors() -> Iterator[str]:
    """Includes between the rooms of src/."""
    for path in tracked("src/*.cc", "src/*.h"):
        room = path.relative_to(ROOT / "src").parts[0]
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = INCLUDE.match(line)
            if match is None or match[1] in {"poseidon", room}:
                continue
            if match[1] not in DOORS.get(room, set()):
                yield f"{path.relative_to(ROOT)}:{number}: {room} may not include {match[1]}"


def check_inner_doors() -> Iterator[str]:
    """Includes between the inner rooms of one room."""
    for path in tracked("src/*.cc", "src/*.h"):
        room = "/".join(path.relative_to(ROOT / "src").parts[:2])
        if room not in INNER_DOORS:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            included = re.match(r'^#include "([^"]+)"', line)
            name = "/".join(included[1].split("/")[:2]) if included else room
            inside = name.split("/")[0] == room.split("/")[0]
            if inside and name != room and name not in INNER_DOORS[room]:
                yield f"{path.relative_to(ROOT)}:{number}: {room} may not include {name}"


def check_python_doors() -> Iterator[str]:
    """Imports between the packages of python/poseidon."""
    base = ROOT / "python" / "poseidon"
    for path in tracked("python/poseidon/*.py"):
        package = path.relative_to(base).parts[0].removesuffix(".py")
        if package not in PYTHON_DOORS:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = IMPORT.match(line)
            name = (match[1] or match[2]) if match else None
            if name and name != package and name not in PYTHON_DOORS[package]:
                yield f"{path.relative_to(ROOT)}:{number}: {package} may not import {name}"


def check_rules() -> Iterator[str]:
    """File length, environment look-ups, process-wide state."""
    for path in tracked("*.py", "*.cc", "*.h", "*.sh"):
        name = path.relative_to(ROOT)
        lines = path.read_text().splitlines()
        if len(lines) >= MAX_LINES:
            yield f"{name}: {len(lines)} lines, at most {MAX_LINES - 1} are allowed"
        for number, line in enumerate(lines, 1):
            if name.parts[0] in {"src", "include"} and "getenv" in line:
                yield f"{name}:{number}: the core reads no environment variables"
            reads = re.search(r"environ(\.get\(|\[)[\"']POSEIDON_", line) and "=" not in line.split("]")[-1]
            if reads and name.parts[0] == "python" and name.name != "options.py":
                yield f"{name}:{number}: POSEIDON_* is read in options.py only"


def main() -> int:
    """Prints all violations; the exit status says whether there are any."""
    violations = [*check_doors(), *check_inner_doors(), *check_python_doors(), *check_rules()]
    for violation in violations:
        print(violation)
    print(f"structure: {len(violations)} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
