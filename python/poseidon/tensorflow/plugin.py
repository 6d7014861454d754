"""The asynchronous operations of `exchange_op.cc`, compiled once for each installed TensorFlow and kept."""

from __future__ import annotations

import ctypes
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import tensorflow as tf

from poseidon import _core
from poseidon.adapter.plugins import PluginError, compiled

OPERATION = "PoseidonExchange_needs_jit_compile_False"  # XLA's error shows this name
NOT_FACTORABLE = -1  # as the number of factors of a gradient that is no product
_SOURCE = Path(__file__).with_name("exchange_op.cc")


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
            raise PluginError("the compiled operations know another version of Poseidon's C interface")
        self._client = client

    def exchange(
        self, value: Any, layer: int, divisor: int, job: int, present: bool = True, count: Any = NOT_FACTORABLE
    ) -> Any:
        """An operation that gives the layer's sum over all ranks, divided. Not `present`: without this rank's value.

        `count`: of how many factors this rank could have made the value, an int64 (K).
        """
        of = {"layer": layer, "divisor": divisor, "job": job, "present": present, "name": OPERATION}
        with tf.device("CPU:0"):
            return self.ops.poseidon_exchange(value, tf.convert_to_tensor(count, tf.int64), **of)

    def exchange_factors(self, left: Any, right: Any, layer: int, divisor: int, job: int) -> Any:
        """The same for the product transpose(left) x right. Only where `takes_factors` gives True."""
        of = {"layer": layer, "divisor": divisor, "job": job, "name": OPERATION}
        with tf.device("CPU:0"):
            return self.ops.poseidon_exchange_factors(left, right, **of)

    def takes_factors(self, layer: int, job: int) -> Any:
        """An operation that gives whether the layer's exchange of this step takes factors, the same on all ranks."""
        with tf.device("CPU:0"):
            return self.ops.poseidon_takes_factors(layer=layer, job=job, name=OPERATION)

    def release(self) -> None:
        """Lets go of the client, after its shutdown. Operations that run from now on fail."""
        self._library.poseidon_set_exchange(None, 0)
        self._client = None


@cache
def plugin() -> Plugin | None:
    """The operations, compiled if need be, which takes about half a minute. None, after a warning, if that fails.

    Blocks.
    """
    try:
        version = f"tensorflow-{tf.version.VERSION}"
        path = compiled(_SOURCE, version, tf.sysconfig.get_compile_flags(), tf.sysconfig.get_link_flags())
        return Plugin(path)
    except (OSError, PluginError, tf.errors.OpError) as error:
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
