"""This process's place in its job: init, rank, world size, barrier, shutdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from poseidon.adapter.agreement import broadcast_alike
from poseidon.adapter.arrays import Bytes
from poseidon.adapter.membership import Membership
from poseidon.adapter.numpy_arrays import NumpyArrays
from poseidon.adapter.process import Process
from poseidon.options import World
from poseidon.tensorflow.plugin import release_client


class VariableArrays(NumpyArrays):
    """Variables of Keras and TensorFlow, as bytes for other ranks, and what a state has of them: NumPy's arrays.

    Call it eagerly, not while a graph is made."""

    def size_bytes(self, array: Any) -> int:
        return math.prod(array.shape) * tf.as_dtype(array.dtype).size

    def bytes_of(self, array: Any) -> Bytes:
        return super().bytes_of(array if isinstance(array, np.ndarray) else array.numpy())

    def overwrite(self, array: Any, data: Bytes) -> None:
        if isinstance(array, np.ndarray):
            super().overwrite(array, data)
            return
        array.assign(data.view(tf.as_dtype(array.dtype).as_numpy_dtype).reshape(array.shape))


VARIABLES = VariableArrays()


class _TensorFlowProcess(Process):
    def __init__(self) -> None:
        super().__init__(VARIABLES, "tensorflow")
        self.job_number = 0  # of the jobs that this process has joined, for graphs that outlive one

    def join(self, place: World | None, options: Mapping[str, Any]) -> None:
        self.job_number += 1
        super().join(place, options)
        here = self.joined()
        here.before_leave, here.meets_in = release_client, "RecoveryCallback"

    def connect(self) -> None:
        """The job has another client: graphs that are made from now on are for that."""
        self.job_number += 1

    def end(self) -> None:
        """Leaves the job. Optimizers, which outlive it, do not keep its client."""
        leaving = self.all()
        super().end()
        release_client()
        for one in leaving:
            one.client = one.control = None


_process = _TensorFlowProcess()


def init(**options: Any) -> None:
    """Joins the job that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe. Waits for all ranks, up to `timeout`.

    `options` are those of `poseidon.options`, e.g. `timeout=60`; a keyword beats the environment. With one worker it
    connects to nothing. Raises a PoseidonError that names what is missing or who did not come.
    """
    _process.init(None, options)


def context() -> Membership:
    """The job of this process. Raises ShutDown before `init()` and after `shutdown()`."""
    return _process.joined()


def job_number() -> int:
    """A number that no earlier job of this process has had, and no earlier generation of one."""
    return _process.job_number


def connect() -> None:
    """Graphs that are made from now on are for the job's next generation."""
    _process.connect()


def rank() -> int:
    """This worker's number, from 0 to world_size() - 1."""
    return context().rank


def world_size() -> int:
    """Number of workers in the job."""
    return context().world_size


def barrier() -> None:
    """Returns once every rank has called it. Raises a PoseidonError if a rank fails or is too late."""
    _process.barrier()


def broadcast_variables(variables: Iterable[Any], root: int = 0) -> None:
    """Gives these variables (of Keras or TensorFlow) the values that they have on rank `root`.

    Collective: every rank passes variables of the same shapes and dtypes in the same order. Call it outside of
    tf.function.
    """
    control = _process.collective_control("broadcast_variables")
    if control is not None:
        named = {f"variable {index}": variable for index, variable in enumerate(variables)}
        broadcast_alike(control, named, root, "list of variable")


def shutdown() -> None:
    """Leaves the job. It does nothing if there is no job. It runs by itself when the process ends."""
    _process.finish()
