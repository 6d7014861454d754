"""`NativeLook`: the check of the replicas in steps that a framework runs without Python.

The compiled step calls `poseidon_begin_step` (include/poseidon/c_exchange.h) with the memory of its parameters. That
counts the steps, and calls Python in those few in which something is compared.
"""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poseidon.adapter.layer import SyncedLayer
from poseidon.adapter.membership import Membership
from poseidon.adapter.replica_check import HostParameters, replica_check
from poseidon.errors import PoseidonError

_FUNCTION = ctypes.CFUNCTYPE(
    ctypes.c_int64, ctypes.c_int64, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_char), ctypes.c_uint64
)

_ONE_AT_A_TIME = threading.Lock()  # compiled steps of two models may run on two threads, which share the messages


class _Struct(ctypes.Structure):
    _fields_ = (
        ("begun", ctypes.c_int64),
        ("next", ctypes.c_int64),
        ("look", _FUNCTION),
        ("count", ctypes.c_uint64),
        ("sizes_bytes", ctypes.POINTER(ctypes.c_uint64)),
    )


class NativeLook:
    """The check of one model's parameters. Collective. It lives as long as compiled steps may run.

    `dtypes` makes a dtype of NumPy from a layer's. `versions` says what the framework is.

    Attributes:
        number: by which compiled steps find it (`PoseidonExchange.find_look`); 0 where nothing is compared.
    """

    def __init__(self, here: Membership, layers: Sequence[SyncedLayer], dtypes: Any, versions: str) -> None:
        self._here, self._versions = weakref.ref(here), versions  # which may have this object
        self._kinds = [(layer.name, layer.shape, np.dtype(dtypes(layer.dtype))) for layer in layers]
        self._check = replica_check(here.settings, here.features)
        if self._check is not None:
            self._check.connect(here.present_control)
        sizes = [math.prod(shape) * dtype.itemsize for _, shape, dtype in self._kinds]
        self._struct = _Struct(0, 0, _FUNCTION(self._look), len(sizes), (ctypes.c_uint64 * len(sizes))(*sizes))
        self.number = 0
        if self._check is not None:
            self.number = here.present_client.add_look(ctypes.addressof(self._struct))
            weakref.finalize(self, here.present_client.remove_look, self.number)

    def begin_step(self, arrays: Callable[[], Sequence[NDArray[Any]]]) -> None:
        """The same for a step that Python runs. `arrays` is called if they are looked at. Raises Mismatch."""
        begun = self._struct.begun
        self._struct.begun += 1
        if self._check is not None and begun >= self._struct.next:
            try:
                self._struct.next = self._begin(arrays(), begun)
            except PoseidonError as error:
                if (here := self._here()) is not None:
                    here.own_failure = error
                raise

    def _begin(self, arrays: Sequence[NDArray[Any]], begun: int) -> int:
        assert self._check is not None
        parameters = HostParameters([name for name, _, _ in self._kinds], arrays, self._versions)
        with _ONE_AT_A_TIME:
            return self._check.begin_step(parameters, begun)

    def _look(self, begun: int, arrays: Any, text: Any, text_size: int) -> int:
        try:
            found = [_array(arrays[index], shape, dtype) for index, (_, shape, dtype) in enumerate(self._kinds)]
            return self._begin(found, begun)
        except BaseException as error:  # there is nobody above but C
            here = self._here()
            if isinstance(error, PoseidonError) and here is not None:
                here.own_failure = error
                here.abort(error)
            told = f"{type(error).__name__}: {error}".encode()[: text_size - 1] + b"\0"
            ctypes.memmove(text, told, len(told))
            return -1


def _array(address: int | None, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
    size_bytes = math.prod(shape) * dtype.itemsize
    if not size_bytes or address is None:
        return np.empty(tuple(shape), dtype)
    memory: Any = (ctypes.c_uint8 * size_bytes).from_address(address)
    return np.frombuffer(memory, np.uint8).view(dtype).reshape(tuple(shape))
