"""TensorFlow's variables for the framework-free code."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from poseidon.adapter.arrays import Arrays, Bytes


class VariableArrays(Arrays):
    """Variables of Keras and TensorFlow, as bytes for other ranks. Call it eagerly, not while a graph is made."""

    def size_bytes(self, array: Any) -> int:
        return math.prod(array.shape) * tf.as_dtype(array.dtype).size

    def bytes_of(self, array: Any) -> Bytes:
        return np.ascontiguousarray(array.numpy()).reshape(-1).view(np.uint8)

    def overwrite(self, array: Any, data: Bytes) -> None:
        array.assign(data.view(tf.as_dtype(array.dtype).as_numpy_dtype).reshape(array.shape))


VARIABLES = VariableArrays()
