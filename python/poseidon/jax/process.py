"""This process's place in its job: init, rank, world size, barrier, broadcast, shutdown."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from poseidon.adapter.agreement import check_same
from poseidon.adapter.layer import SyncedLayer
from poseidon.adapter.membership import Membership
from poseidon.adapter.native_look import NativeLook
from poseidon.adapter.numpy_arrays import NUMPY_ARRAYS
from poseidon.adapter.process import Process
from poseidon.errors import InvalidArgument, PoseidonError
from poseidon.jax.plugin import close_port, open_port
from poseidon.jax.turns import forget_turns, wait_for_turns
from poseidon.options import World


@dataclass
class Connection:
    """The plugin's port to one client, and what programs that use it were traced with.

    `port` is 0 where there is no client. `tables` has the layers of each model by its description, and `looks` what
    compares the ranks' parameters, by the first layer of a table.
    """

    port: int = 0
    tables: dict[str, list[SyncedLayer]] = field(default_factory=dict)
    looks: dict[int, NativeLook] = field(default_factory=dict)


class _JaxProcess(Process):
    """The job, and the connection to its present client."""

    # What crosses to other ranks are copies in host memory, because JAX's arrays are never written.
    def __init__(self) -> None:
        super().__init__(NUMPY_ARRAYS, "jax")
        self.connection = Connection()

    def join(self, place: World | None, options: Mapping[str, Any]) -> None:
        super().join(place, options)
        here = self.joined()
        if here.settings.world_size > 1 and jax.default_backend() != "cpu":
            self.end()
            raise InvalidArgument("poseidon.jax exchanges gradients on JAX's CPU platform only: set JAX_PLATFORMS=cpu")
        here.before_leave = self.disconnect
        if here.client is not None:
            self.connect()

    def connect(self) -> None:
        """Connects programs that are traced from now on to the present client."""
        self.connection = Connection(open_port(self.joined().present_client))

    def disconnect(self) -> None:
        """Ends the connection. What was traced with it is traced again when it is next called."""
        connection, self.connection = self.connection, Connection()
        if not connection.port:
            return
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # of a job that has failed
            wait_for_turns(connection.port)  # steps that are still under way need the port
        close_port(connection.port)
        forget_turns(connection.port)
        if self.own is not None and self.own.recovers:
            jax.clear_caches()

    def end(self) -> None:
        self.disconnect()
        super().end()

    def _abort(self, error: BaseException) -> None:
        # JAX wraps the failure in an error of its own, which says nothing of its cause to the launcher.
        own = self.own
        failure = own.client.failure if own is not None and own.client is not None else None
        super()._abort(failure if failure is not None and isinstance(error, jax.errors.JaxRuntimeError) else error)


_process = _JaxProcess()


def init(**options: Any) -> None:
    """Joins the job. Waits for all ranks, up to `timeout`.

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe the job (`poseidon run` and torchrun set them). `options` are
    those of `poseidon.options`. With one worker it connects to nothing. Raises a PoseidonError.
    """
    _process.init(None, options)


def context() -> Membership:
    """The job of this process; ShutDown before `init()` and after `shutdown()`."""
    return _process.joined()


def connection() -> Connection:
    """The connection to the job's present client."""
    return _process.connection


def connect() -> None:
    """Connects programs that are traced from now on to the client of the job's next generation."""
    _process.connect()


def port() -> int:
    """The number of the plugin's port to the job's client; 0 with one worker."""
    return _process.connection.port


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
    found = {index: host_copy(leaf) for index, (_, leaf) in enumerate(paths) if is_array(leaf)}
    names = [f"{jax.tree_util.keystr(paths[at][0])} {one.dtype.name} {one.shape}" for at, one in found.items()]
    check_same(control, "\n".join(names), "tree")
    control.broadcast(list(found.values()), root)
    leaves = [like(leaf, found[at]) if at in found else leaf for at, (_, leaf) in enumerate(paths)]
    return jax.tree_util.tree_unflatten(form, leaves)


def is_array(leaf: Any) -> bool:
    """Whether it crosses to other ranks: an array, a random key, or a number."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex))


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def host_copy(leaf: Any) -> Any:
    """A copy of what `is_array` takes, as NumPy's array."""
    return np.array(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def like(leaf: Any, received: Any) -> Any:
    """JAX's array, or random key, of the host copy of a leaf like this one."""
    if _is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(received), impl=jax.random.key_impl(leaf))
    return jnp.asarray(received)


def shutdown() -> None:
    """Leaves the job when nothing is in flight any more. It runs by itself when the process ends."""
    _process.finish()
