"""NumPy's arrays for the framework-free code: of frameworks whose arrays are copied to the host for others."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import numpy as np

from poseidon.adapter.arrays import ArrayKind, Bytes, StateArrays

_NAMES = (
    "float64 float32 float16 bfloat16 complex128 complex64 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool "
    "float8_e4m3fn float8_e5m2 int4 uint4"
)


def _dtypes() -> dict[str, Any]:
    # JAX and TensorFlow bring it along.
    small: Any = importlib.import_module("ml_dtypes") if find_spec("ml_dtypes") is not None else None
    found = {name: getattr(small, name, None) or np.sctypeDict.get(name) for name in _NAMES.split()}
    return {name: np.dtype(scalar) for name, scalar in found.items() if scalar is not None}


class NumpyArrays(StateArrays):
    """Arrays of numbers, also in the small formats of `ml_dtypes`."""

    dtypes = _dtypes()

    def kind_of(self, value: Any) -> ArrayKind | None:
        if isinstance(value, np.ndarray) and value.dtype.name in self.dtypes:
            return value.dtype.name, tuple(value.shape)
        return None

    def size_bytes(self, array: Any) -> int:
        return int(array.nbytes)

    def bytes_of(self, array: Any) -> Bytes:
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def overwrite(self, array: Any, data: Bytes) -> None:
        array[...] = data.view(array.dtype).reshape(array.shape)

    def make(self, kind: ArrayKind, data: bytearray | None = None) -> Any:
        name, shape = kind
        if not data:
            return np.empty(shape, self.dtypes[name])
        return np.frombuffer(data, self.dtypes[name]).reshape(shape)

    def host_copy(self, array: Any) -> Any:
        return np.array(array)

    def copy(self, array: Any) -> Any:
        return array.copy()


NUMPY_ARRAYS = NumpyArrays()
