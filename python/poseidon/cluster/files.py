"""The files that a program consists of, which all machines must have alike."""

from __future__ import annotations

import ast
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from poseidon.errors import InvalidArgument

_SETTINGS = "poseidon.toml"


def program_files(script: str, is_module: bool) -> list[str]:
    """The script, all that it imports from its folder, and poseidon.toml, as far as they are there.

    Relative to the working directory where they are below it, otherwise absolute. A module of the working directory
    counts as a script; one that is installed has no files here. An import by a name that is made while the program
    runs is not found.
    """
    found: dict[Path, None] = {}
    if is_module:
        folder, first = Path.cwd(), list(_modules(Path.cwd(), script))
    else:
        folder, first = Path(script).absolute().parent, [Path(script).absolute()]
    _follow(first, folder, found)
    if Path(_SETTINGS).is_file():
        found[Path(_SETTINGS).absolute()] = None
    return [_relative(path) for path in found]


def _relative(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _follow(files: Sequence[Path], folder: Path, found: dict[Path, None]) -> None:
    waiting = list(files)
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found[path] = None
        waiting += [one for name in _imported(path, folder) for one in _modules(folder, name)]


def _imported(path: Path, folder: Path) -> Iterator[str]:
    """Names with dots, of modules or of what is in them."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # the program says it better
    package = path.relative_to(folder).parent.parts if path.is_relative_to(folder) else ()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            stem = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{stem}.{alias.name}" if stem else alias.name for alias in node.names)


def _modules(folder: Path, name: str) -> Iterator[Path]:
    """The files below `folder` that importing a name with dots runs."""
    place = folder
    for part in name.split("."):
        place = place / part
        for path in (place / "__init__.py", place.with_suffix(".py"), place / "__main__.py"):
            if path.is_file():
                yield path


def synchronize(ssh: str, host: str, program: str = "rsync") -> None:
    """Copies the working directory there, to the same path, without what git ignores. Raises InvalidArgument."""
    if shutil.which(program) is None:
        raise InvalidArgument("--sync needs rsync on this machine and on the others: install it")
    folder = str(Path.cwd())
    options = "-oBatchMode=yes -oConnectTimeout=5 -oLogLevel=ERROR"
    command = [
        *(program, "-az", "--from0", "--files-from=-", "-e", f"{ssh} {options}"),
        *("--rsync-path", f"mkdir -p {shlex.quote(folder)} && {program}"),
        *("./", f"{_bracketed(host)}:{folder}/"),
    ]
    done = subprocess.run(command, input=b"\0".join(_tracked()), capture_output=True, check=False)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {done.returncode}"]
        raise InvalidArgument(f"the working directory cannot be copied to host {host}: {lines[0]}")


def _bracketed(host: str) -> str:
    user, at, name = host.rpartition("@")
    return f"{user}{at}[{name}]" if ":" in name else host


def _tracked() -> list[bytes]:
    """All files of the working directory; within a repository those that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], capture_output=True, check=False
    )
    if listed.returncode == 0:
        return [name for name in listed.stdout.split(b"\0") if name and os.path.lexists(name)]
    return [os.fsencode(Path(top, name).relative_to(".")) for top, _, names in os.walk(".") for name in names]
