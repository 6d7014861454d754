"""`all_reduce`: the mean, sum, smallest or largest of values over all ranks, in a graph or eagerly.

A sum is one exchange of all tensors of a type. The smallest and the largest are found in a sum of which each rank fills
its own row. In a graph TensorFlow runs these operations in the order of the program, as all that have effects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from poseidon.adapter.membership import Membership
from poseidon.adapter.value_layers import value_layer
from poseidon.errors import InvalidArgument, ShutDown
from poseidon.tensorflow.context import context, job_number
from poseidon.tensorflow.plugin import plugin

Operation = Literal["mean", "sum", "min", "max"]

_LAST: dict[str, Callable[..., Any]] = {"min": tf.reduce_min, "max": tf.reduce_max}
_EXCHANGED = (tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int32, tf.int64)
_CARRIED = {tf.uint32: tf.int32, tf.uint64: tf.int64, tf.complex64: tf.float32, tf.complex128: tf.float64}
_SMALL = (tf.bool, tf.int8, tf.int16, tf.uint8, tf.uint16)


def all_reduce(values: Any, operation: Operation = "mean") -> Any:
    """The mean, sum, smallest or largest over all ranks, of each element of one tensor or of a nested structure.

    Every rank gets the same bits. Use it in a tf.function or eagerly. All ranks call it on the same shapes in the same
    order. The first call for new shapes, when it is traced, waits for all ranks, and raises Mismatch if they differ.
    Types stay, but the mean of integers is float32, and a sum of booleans counts them. A derivative through it is the
    mean of those of all ranks' losses, as DistributedOptimizer makes it.
    """
    if operation not in ("mean", "sum", "min", "max"):
        raise InvalidArgument(f"all_reduce has no operation {operation!r}: pass one of mean, sum, min, max")
    here = context()
    here.check_met("all_reduce")
    tensors = [tf.convert_to_tensor(one) for one in tf.nest.flatten(values)]
    if any(not one.shape.is_fully_defined() for one in tensors):
        raise InvalidArgument("all_reduce of a tensor whose shape the graph does not know: use tf.ensure_shape before")
    sent = [_prepared(one, operation) for one in tensors]
    results: list[Any] = [None] * len(tensors)
    for dtype in sorted({one.dtype.name for one in sent}):
        places = [index for index, one in enumerate(sent) if one.dtype.name == dtype]
        flat = tf.concat([tf.reshape(sent[index], [-1]) for index in places], 0)
        found = _reduced(here, flat, operation)
        parts = tf.split(found, [sent[index].shape.num_elements() for index in places], axis=1)
        for index, part in zip(places, parts, strict=True):
            results[index] = _restored(part, tensors[index], sent[index], operation)
    return tf.nest.pack_sequence_as(values, results)


def _prepared(value: Any, operation: str) -> Any:
    """The value in a type that servers add up."""
    if value.dtype.is_complex and operation in _LAST:
        raise InvalidArgument(f"complex numbers have no {operation}: pass their parts")
    if operation == "mean" and (value.dtype.is_integer or value.dtype == tf.bool):
        return tf.cast(value, tf.float32)
    if value.dtype in _CARRIED:
        return tf.bitcast(value, _CARRIED[value.dtype])
    if value.dtype in _SMALL:
        return tf.cast(value, tf.int32)
    if value.dtype not in _EXCHANGED:
        raise InvalidArgument(f"all_reduce of a tensor of {value.dtype.name}: pass numbers, such as float32 or int32")
    return value


def _reduced(here: Membership, flat: Any, operation: str) -> Any:
    """The result as one row, or the values of all ranks as one row each."""
    if here.client is None or flat.shape[0] == 0:
        return flat[None]
    if operation not in _LAST:
        return _exchange(here, flat, here.world_size if operation == "mean" else 1)[None]
    count = flat.shape[0]
    padded = tf.pad(flat, [[here.rank * count, (here.world_size - 1 - here.rank) * count]])
    return tf.reshape(_exchange(here, padded, 1), [here.world_size, count])


def _restored(rows: Any, value: Any, sent: Any, operation: str) -> Any:
    rows = tf.reshape(rows, [rows.shape[0], *sent.shape])
    if sent.dtype == _CARRIED.get(value.dtype):
        rows = tf.bitcast(rows, value.dtype)
    if operation in _LAST:
        if value.dtype == tf.bool or value.dtype in (tf.uint32, tf.uint64):
            wide = tf.cast(rows, tf.int64) if value.dtype != tf.uint64 else rows
            return tf.cast(_LAST[operation](wide, axis=0), value.dtype)
        return tf.cast(_LAST[operation](rows, axis=0), value.dtype)
    stays = operation == "sum" and value.dtype != tf.bool
    return tf.cast(rows[0], value.dtype) if stays else rows[0]


def _exchange(here: Membership, flat: Any, divisor: int) -> Any:
    """The sum of these vectors over all ranks, divided. Its derivative is the same of the derivatives."""
    layer = value_layer(here, flat.dtype.name, flat.shape[0], divisor)

    @tf.custom_gradient
    def exchanged(vector: Any) -> Any:
        return _operation(here, vector, layer, divisor), lambda slope: _operation(here, slope, layer, divisor)

    return exchanged(flat)


def _operation(here: Membership, vector: Any, layer: int, divisor: int) -> Any:
    loaded = plugin()
    if loaded is None:
        return tf.ensure_shape(
            tf.numpy_function(_by_python(here, layer, divisor), [vector], vector.dtype), vector.shape
        )
    assert here.client is not None
    loaded.use(here.client, job_number())
    return loaded.exchange(vector, layer, divisor, job_number())


def _by_python(here: Membership, layer: int, divisor: int) -> Callable[[Any], Any]:
    def exchange(vector: Any) -> Any:
        if here.client is None:
            raise ShutDown("this function was traced in a job that this process has left: trace it again")
        total = np.array(vector)  # the core writes into it
        here.client.start(layer, total, divisor)
        here.client.wait(layer)
        return total

    return exchange
