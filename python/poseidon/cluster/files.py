"""The files that a program consists of, which all machines must have alike."""

from __future__ import annotations

import ast
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from poseidon.cluster.ssh import ssh_options
from poseidon.errors import InvalidArgument
from poseidon.launch.workers import die_with_parent

_PROGRAM = "rsync"
_POLL_S = 0.05
_SETTINGS = "poseidon.toml"
_OTHER_SETTINGS = "POSEIDON_CONFIG"


def program_files(script: str, is_module: bool) -> list[str]:
    """The script, all that it imports from its folder or PYTHONPATH, and the file of options, as far as they are there.

    Relative to the working directory where they are below it, otherwise absolute. A module of the working directory
    counts as a script; one that is installed has no files here. An import by a name that is made while the program
    runs is not found.
    """
    found: dict[Path, None] = {}
    own = Path(script).resolve()  # beside which Python looks, also if the script is a link
    if is_module:
        folder, first = Path.cwd(), list(_modules([Path.cwd()], script))
    elif own.is_dir():
        folder, first = own, [own / "__main__.py"]
    else:
        folder, first = own.parent, list(dict.fromkeys([Path(script).absolute(), own]))
    more = [Path(part).resolve() for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    _follow(first, [folder, *more], found)
    for settings in filter(None, (_SETTINGS, os.environ.get(_OTHER_SETTINGS))):
        if Path(settings).is_file():
            found[Path(settings).absolute()] = None
    return [_relative(path) for path in found]


def _relative(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _follow(files: Sequence[Path], folders: Sequence[Path], found: dict[Path, None]) -> None:
    waiting = list(files)
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found[path] = None
        waiting += [one for name in _imported(path, folders) for one in _modules(folders, name)]


def _imported(path: Path, folders: Sequence[Path]) -> Iterator[str]:
    """Names with dots, of modules or of what is in them."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # the program says it better
    packages = (path.relative_to(folder).parent.parts for folder in folders if path.is_relative_to(folder))
    package = next(packages, ())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            stem = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{stem}.{alias.name}" if stem else alias.name for alias in node.names)


def _modules(folders: Sequence[Path], name: str) -> Iterator[Path]:
    """The files below `folders` that importing a name with dots runs."""
    for folder in folders:
        place = folder
        for part in name.split("."):
            place = place / part
            for path in (place / "__init__.py", place.with_suffix(".py"), place / "__main__.py"):
                if path.is_file():
                    yield path


def synchronize(ssh: str, hosts: Sequence[str], interrupted: Callable[[], bool]) -> None:
    """Copies the working directory to all hosts, to the same path, without what git ignores.

    Raises InvalidArgument, and KeyboardInterrupt after a signal.
    """
    if shutil.which(_PROGRAM) is None:
        raise InvalidArgument(f"--sync needs {_PROGRAM} on this machine and on the others: install it")
    names = b"\0".join(_tracked())
    with contextlib.ExitStack() as stack:
        copies = [stack.enter_context(_copy(ssh, host, names)) for host in hosts]
        while any(copy.poll() is None for copy, _ in copies):
            if interrupted():
                raise KeyboardInterrupt
            time.sleep(_POLL_S)
        for host, (copy, errors) in zip(hosts, copies, strict=True):
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()
            if copy.returncode:
                why = lines[0] if lines else f"exit status {copy.returncode}"
                raise InvalidArgument(f"the working directory cannot be copied to host {host}: {why}")


@contextlib.contextmanager
def _copy(ssh: str, host: str, names: bytes) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """One copy under way, which ends with this process and with the context, and what it says."""
    folder = str(Path.cwd())
    command = [
        *(_PROGRAM, "-az", "--from0", "--files-from=-", "-e", f"{ssh} {shlex.join(ssh_options())}"),
        *("--rsync-path", f"mkdir -p {shlex.quote(folder)} && {_PROGRAM}"),
        *("./", f"{_bracketed(host)}:{folder}/"),
    ]
    with tempfile.TemporaryFile() as files, tempfile.TemporaryFile() as errors:
        files.write(names)
        files.seek(0)
        process = subprocess.Popen(
            command, stdin=files, stdout=errors, stderr=errors, start_new_session=True, preexec_fn=die_with_parent()
        )
        try:
            yield process, errors
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _bracketed(host: str) -> str:
    user, at, name = host.rpartition("@")
    return f"{user}{at}[{name}]" if ":" in name else host


def _tracked() -> list[bytes]:
    """All files of the working directory; within a repository those that git does not ignore."""
    of_git: list[bytes] = []
    for options in (["--cached", "--recurse-submodules"], ["--others", "--exclude-standard"]):
        try:
            listed = subprocess.run(["git", "ls-files", "-z", *options], capture_output=True, check=False)
        except OSError:  # there is no git
            listed = None
        if listed is None or listed.returncode:
            return [os.fsencode(Path(top, name).relative_to(".")) for top, name in _walk()]
        of_git += [name for name in listed.stdout.split(b"\0") if name and os.path.lexists(name)]
    return of_git


def _walk() -> Iterator[tuple[str, str]]:
    for top, folders, names in os.walk("."):
        yield from ((top, name) for name in names)
        yield from ((top, name) for name in folders if Path(top, name).is_symlink())
