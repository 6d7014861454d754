"""The C++ handlers that XLA calls: compiled at first use, and kept in a private folder of the user's cache."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax
import jaxlib

from poseidon import _core
from poseidon.chunk_cache import cache_folder
from poseidon.errors import PoseidonError

_SOURCE = Path(__file__).with_name("plugin.cc")
_CLIENT_NAME = b"poseidon.plugin_client.1"
_numbers = itertools.count(1)


def open_port(client: _core.Client) -> int:
    """Connects the handlers to `client`, which must live until `close_port`. Returns the port's number."""
    number = next(_numbers)
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    address = pointer(client.plugin_client, _CLIENT_NAME)
    _library().poseidon_open(ctypes.c_int64(number), ctypes.c_void_p(address), ctypes.c_uint32(client.world_size))
    return number


def close_port(number: int) -> None:
    """Waits for the port's pulls and closes it."""
    _library().poseidon_close(ctypes.c_int64(number))


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(_built()))
    for name in ("poseidon_push", "poseidon_pull"):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return library


def _built() -> Path:
    """The compiled library of this source and this jaxlib. Several processes may build it at once."""
    header = Path(_core.__file__).parent / "include" / "poseidon" / "plugin.h"
    key = hashlib.sha256(_SOURCE.read_bytes() + header.read_bytes() + jaxlib.__version__.encode()).hexdigest()[:20]
    folder = cache_folder() / "plugins"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PoseidonError(f"{folder} may be written by others, so no code is loaded from it: chmod 700 {folder}")
    library = folder / f"jax-{key}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            made = Path(work) / library.name
            _compile(header.parents[1], made)
            made.replace(library)
    return library


def _compile(include: Path, library: Path) -> None:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise PoseidonError(
            "poseidon.jax compiles a small plugin at first use, and there is no C++ compiler: install g++"
        )
    command = [compiler, "-std=c++17", "-O2", "-fPIC", "-shared", "-pthread", "-w"]
    command += [f"-I{include}", f"-I{jax.ffi.include_dir()}", "-o", str(library), str(_SOURCE)]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        raise PoseidonError(f"the plugin for JAX does not compile: {' '.join(command)}\n{ended.stderr[-2000:]}")
