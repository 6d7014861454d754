"""Plugins: C++ files that are compiled against a framework on the user's machine, once, and kept.

They reach a client by `include/poseidon/c_exchange.h`, whose address is `_core.Client.c_exchange`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from poseidon import _core
from poseidon.chunk_cache import cache_folder
from poseidon.errors import PoseidonError

_HEADERS = Path(_core.__file__).parent / "include"
_COMPILERS = ("c++", "g++", "clang++")
_COMPILE_SECONDS = 600.0
_PARTIAL = "partial-"  # the names of files that are being compiled begin so


class PluginError(PoseidonError):
    """A plugin cannot be compiled or loaded here."""


def compiled(source: Path, framework: str, flags: Sequence[str], link_flags: Sequence[str] = ()) -> Path:
    """The shared library of `source` for this framework (its name and version), machine, compiler and flags.

    Compiles it if it is not there yet, which takes seconds. Several processes may do so at once: each compiles into a
    file of its own and puts it in place whole. Raises PluginError.
    """
    try:
        command = [*_compiler(), "-shared", "-fPIC", "-pthread", "-O2", "-w", f"-I{_HEADERS}", *flags]
        header = _HEADERS / "poseidon" / "c_exchange.h"
        digest = hashlib.blake2b(digest_size=8)
        for part in (source.read_bytes(), header.read_bytes(), "\0".join([platform.machine(), *command]).encode()):
            digest.update(part + b"\0")
        path = _folder() / f"{framework}-{source.stem}-{digest.hexdigest()}.so"
        if not path.exists():
            _compile([*command, str(source), *link_flags], path)
        return path
    except (OSError, subprocess.SubprocessError) as error:
        raise PluginError(f"{source.name} cannot be compiled: {error}") from error


def _compiler() -> list[str]:
    """The compiler that CXX names, or else the first that is found."""
    named = shlex.split(os.environ.get("CXX", ""))
    found = named or [path for path in map(shutil.which, _COMPILERS) if path][:1]
    if not found or shutil.which(found[0]) is None:
        raise PluginError(f"there is no C++ compiler {found[0] if found else ''}".rstrip())
    return found


def _folder() -> Path:
    """Where plugins are kept. Code is loaded from it, so nobody else may write there."""
    folder = cache_folder() / "plugins"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    owner = folder.stat()
    if owner.st_uid != os.getuid() or owner.st_mode & 0o022:
        raise PluginError(f"{folder} can be written by others than this user: correct its owner and its mode")
    return folder


def _remove_remains(folder: Path) -> None:
    """Removes what processes have left that were killed while they compiled."""
    latest = time.time() - 2 * _COMPILE_SECONDS
    for remains in folder.glob(f"{_PARTIAL}*.so"):
        with contextlib.suppress(FileNotFoundError):  # another process does the same
            if remains.stat().st_mtime < latest:
                remains.unlink()


def _compile(command: Sequence[str], path: Path) -> None:
    """Makes the file as a whole or not at all."""
    _remove_remains(path.parent)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=_PARTIAL, suffix=".so")
    os.close(descriptor)
    try:
        done = subprocess.run(
            [*command, "-o", name], capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
            raise PluginError(f"the compiler says of {path.name}: {lines[0]}")
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
