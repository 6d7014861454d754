"""This process's place in its job: init, rank, world size, barrier, broadcast, shutdown."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from poseidon.adapter.agreement import check_same
from poseidon.adapter.arrays import Arrays, Bytes
from poseidon.adapter.membership import Membership
from poseidon.adapter.process import Process
from poseidon.errors import InvalidArgument, PoseidonError
from poseidon.jax.plugin import close_port, open_port
from poseidon.options import World


class _HostArrays(Arrays):
    """JAX's arrays are never written, so what crosses to other ranks are NumPy copies of them."""

    def size_bytes(self, array: Any) -> int:
        return int(array.nbytes)

    def bytes_of(self, array: Any) -> Bytes:
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def overwrite(self, array: Any, data: Bytes) -> None:
        array[...] = data.view(array.dtype).reshape(array.shape)


class _JaxProcess(Process):
    """The job, and the plugin's port to its client."""

    port = 0

    def join(self, place: World | None, options: Mapping[str, Any]) -> None:
        super().join(place, options)
        here = self.joined()
        if here.client is not None:
            if jax.default_backend() != "cpu":
                self.end()
                raise InvalidArgument(
                    "poseidon.jax exchanges gradients on JAX's CPU platform only: set JAX_PLATFORMS=cpu"
                )
            self.port = open_port(here.client)

    def end(self) -> None:
        port, self.port = self.port, 0
        if port:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # of a job that has failed
                jax.effects_barrier()  # steps that are still under way need the port
            close_port(port)
        super().end()

    def _abort(self, error: BaseException) -> None:
        # JAX wraps the failure in an error of its own, which says nothing of its cause to the launcher.
        own = self.own
        failure = own.client.failure if own is not None and own.client is not None else None
        super()._abort(failure if failure is not None and isinstance(error, jax.errors.JaxRuntimeError) else error)


_process = _JaxProcess(_HostArrays(), "jax")


def init(**options: Any) -> None:
    """Joins the job. Waits for all ranks, up to `timeout`.

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe the job (`poseidon run` and torchrun set them). `options` are
    those of `poseidon.options`. With one worker it connects to nothing. Raises a PoseidonError.
    """
    _process.init(None, options)


def context() -> Membership:
    """The job of this process; ShutDown before `init()` and after `shutdown()`."""
    return _process.joined()


def port() -> int:
    """The number of the plugin's port to the job's client; 0 with one worker."""
    return _process.port


def rank() -> int:
    """This worker's number, from 0 to world_size() - 1."""
    return context().rank


def world_size() -> int:
    """Number of workers in the job."""
    return context().world_size


def failure() -> PoseidonError | None:
    """The error that has ended the job, here or on another rank, or None. JAX raises it as a JaxRuntimeError."""
    client = context().client
    return None if client is None else client.failure


def barrier() -> None:
    """Returns once every rank has called it."""
    _process.barrier()


def broadcast(tree: Any, root: int = 0) -> Any:
    """A copy of rank `root`'s arrays and random keys, in a tree of the same form.

    What is neither stays each rank's own, such as functions in a module of Equinox. The given arrays stay as they are.
    Collective. Raises Mismatch if the ranks' trees differ.
    """
    control = _process.collective_control("broadcast")
    if control is None:
        return tree
    paths, form = jax.tree_util.tree_flatten_with_path(tree)
    found = {index: _host_copy(leaf) for index, (_, leaf) in enumerate(paths) if _is_array(leaf)}
    names = [f"{jax.tree_util.keystr(paths[at][0])} {one.dtype.name} {one.shape}" for at, one in found.items()]
    check_same(control, "\n".join(names), "tree")
    control.broadcast(list(found.values()), root)
    leaves = [_like(leaf, found[at]) if at in found else leaf for at, (_, leaf) in enumerate(paths)]
    return jax.tree_util.tree_unflatten(form, leaves)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex))


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _host_copy(leaf: Any) -> Any:
    return np.array(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _like(leaf: Any, received: Any) -> Any:
    if _is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(received), impl=jax.random.key_impl(leaf))
    return jnp.asarray(received)


def shutdown() -> None:
    """Leaves the job when nothing is in flight any more. It runs by itself when the process ends."""
    _process.finish()
