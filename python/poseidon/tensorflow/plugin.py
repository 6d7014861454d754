"""The asynchronous operations of `exchange_op.cc`, compiled once for each installed TensorFlow and kept."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import tensorflow as tf

from poseidon import _core

_SOURCE = Path(__file__).with_name("exchange_op.cc")
_HEADERS = Path(_core.__file__).parent / "include"
_COMPILERS = ("c++", "g++", "clang++")
_COMPILE_SECONDS = 600.0


class Plugin:
    """The compiled operations, loaded into TensorFlow."""

    def __init__(self, path: Path) -> None:
        self.ops: Any = tf.load_op_library(str(path))
        self._library = ctypes.CDLL(str(path))
        self._library.poseidon_set_exchange.argtypes = (ctypes.c_void_p, ctypes.c_int)
        self._client: _core.Client | None = None

    def use(self, client: _core.Client, job: int) -> None:
        """Makes this client the one of operations that carry the number `job`, and keeps it until `release`."""
        if not self._library.poseidon_set_exchange(client.c_exchange, job):
            raise RuntimeError("the compiled operations know another version of Poseidon's C interface")
        self._client = client

    def release(self) -> None:
        """Lets go of the client, after its shutdown. Operations that run from now on fail."""
        self._library.poseidon_set_exchange(None, 0)
        self._client = None


@cache
def plugin() -> Plugin | None:
    """The operations, compiled if need be, which takes about half a minute. None, after a warning, if that fails.

    Blocks. Several processes may call it at once: each compiles into a file of its own and puts it in place whole.
    """
    try:
        path = _library_path()
        if not path.exists():
            _compile(path)
        return Plugin(path)
    except (OSError, RuntimeError, subprocess.SubprocessError, tf.errors.OpError) as error:
        warnings.warn(
            f"Poseidon's operations for TensorFlow cannot be compiled: {error}. Training is exact without them but "
            "slower: gradients are exchanged after backward, not during it. Install a C++ compiler (g++), or name one "
            "in CXX",
            stacklevel=2,
        )
        return None


def release_client() -> None:
    """Makes the operations, if they are loaded, let go of their client."""
    loaded = plugin() if plugin.cache_info().currsize else None
    if loaded is not None:
        loaded.release()


def _command() -> list[str]:
    """The command that compiles, without source and result. Raises FileNotFoundError if there is no compiler."""
    named = shlex.split(os.environ.get("CXX", ""))
    found = named or [path for path in map(shutil.which, _COMPILERS) if path][:1]
    if not found or shutil.which(found[0]) is None:
        raise FileNotFoundError(f"there is no C++ compiler {found[0] if found else ''}".rstrip())
    flags = tf.sysconfig.get_compile_flags()
    return [*found, "-shared", "-fPIC", "-O2", "-w", f"-I{_HEADERS}", *flags]


def _library_path() -> Path:
    """Where the operations lie for this source, TensorFlow, machine and compiler. The folder belongs to the user."""
    header = _HEADERS / "poseidon" / "c_exchange.h"
    facts = [tf.version.VERSION, tf.version.GIT_VERSION, platform.machine(), *_command()]
    digest = hashlib.blake2b(digest_size=8)
    for part in (_SOURCE.read_bytes(), header.read_bytes(), "\0".join(facts).encode()):
        digest.update(part + b"\0")
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "poseidon" / "tensorflow"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    owner = folder.stat()
    if owner.st_uid != os.getuid() or owner.st_mode & 0o022:
        raise PermissionError(f"{folder} can be written by others than this user: correct its owner and its mode")
    return folder / f"exchange_op-{tf.version.VERSION}-{digest.hexdigest()}.so"


def _compile(path: Path) -> None:
    """Makes the file as a whole or not at all."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(descriptor)
    try:
        command = [*_command(), str(_SOURCE), "-o", name, *tf.sysconfig.get_link_flags()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
            raise RuntimeError(f"the compiler says: {lines[0]}")
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
