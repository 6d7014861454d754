"""The C++ handlers that XLA calls: compiled at first use, and kept in a private folder of the user's cache."""

from __future__ import annotations

import ctypes
import functools
import itertools
from pathlib import Path

import jax
import jaxlib

from poseidon import _core
from poseidon.adapter.plugins import PluginError, compiled

_SOURCE = Path(__file__).with_name("plugin.cc")
_numbers = itertools.count(1)


def open_port(client: _core.Client) -> int:
    """Connects the handlers to `client`, which must live until `close_port`. Returns the port's number.

    Raises PluginError if the handlers cannot be compiled.
    """
    number = next(_numbers)
    if not _library().poseidon_open(ctypes.c_int64(number), ctypes.c_void_p(client.c_exchange)):
        raise PluginError("the compiled handlers know another version of Poseidon's C interface")
    return number


def close_port(number: int) -> None:
    """Waits for the port's pulls and closes it."""
    _library().poseidon_close(ctypes.c_int64(number))


@functools.cache
def _library() -> ctypes.CDLL:
    flags = ["-std=c++17", f"-I{jax.ffi.include_dir()}"]
    library = ctypes.CDLL(str(compiled(_SOURCE, f"jaxlib-{jaxlib.__version__}", flags)))
    for name in ("poseidon_push", "poseidon_push_factors", "poseidon_pull", "poseidon_look", "poseidon_turn"):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return library
