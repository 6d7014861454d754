"""TensorFlow's variables, and NumPy's arrays for what is kept of them, for the framework-free code."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from poseidon.adapter.arrays import ArrayKind, Arrays, Bytes

_DTYPES = {
    dtype.name: dtype.as_numpy_dtype
    for dtype in (
        tf.float64, tf.float32, tf.float16, tf.bfloat16, tf.int64, tf.int32, tf.int16, tf.int8,
        tf.uint64, tf.uint32, tf.uint16, tf.uint8, tf.bool,
    )
}  # fmt: skip


class VariableArrays(Arrays):
    """Variables of Keras and TensorFlow, as bytes for other ranks. Call it eagerly, not while a graph is made."""

    dtypes = _DTYPES

    def kind_of(self, value: Any) -> ArrayKind | None:
        is_array = isinstance(value, np.ndarray) and value.dtype.name in _DTYPES
        return (value.dtype.name, value.shape) if is_array else None

    def describe(self, value: Any) -> str:
        return type(value).__name__

    def size_bytes(self, array: Any) -> int:
        return math.prod(array.shape) * tf.as_dtype(array.dtype).size

    def bytes_of(self, array: Any) -> Bytes:
        return np.ascontiguousarray(array.numpy()).reshape(-1).view(np.uint8)

    def overwrite(self, array: Any, data: Bytes) -> None:
        array.assign(data.view(tf.as_dtype(array.dtype).as_numpy_dtype).reshape(array.shape))

    def make(self, kind: ArrayKind, data: bytearray | None = None) -> NDArray[Any]:
        name, shape = kind
        dtype = _DTYPES[name]
        return np.empty(shape, dtype) if data is None else np.frombuffer(data, dtype).reshape(shape)

    def host_copy(self, array: Any) -> NDArray[Any]:
        return np.array(array)

    copy = host_copy

    def kind_size_bytes(self, kind: ArrayKind) -> int:
        name, shape = kind
        return math.prod(shape) * np.dtype(_DTYPES[name]).itemsize


VARIABLES = VariableArrays()
