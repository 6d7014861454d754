"""What the framework-free code asks of a framework's arrays: `Arrays`, which each framework implements once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

ArrayKind = tuple[str, tuple[int, ...]]
"""The name of an array's dtype, a key of `Arrays.dtypes`, and its shape."""

Bytes = NDArray[np.uint8]
"""Bytes in host memory, in one dimension."""


class Arrays(ABC):
    """A framework's arrays as bytes: how they go to other ranks and to files. Stateless; any thread may use it.

    The bytes of an array are its elements in the order of its indices, without gaps, whatever the array's own layout
    and device.
    """

    dtypes: Mapping[str, Any] = {}
    """The framework's dtypes that a state may have, by the names that they have in messages and files."""

    tuples: tuple[type, ...] = (tuple,)
    """The types of shapes and the like, which a state gives back as plain tuples."""

    @abstractmethod
    def kind_of(self, value: Any) -> ArrayKind | None:
        """The kind of an array that a state may have; None for every other value."""

    @abstractmethod
    def describe(self, value: Any) -> str:
        """What `value` is, for an error that names a value that no state may have."""

    @abstractmethod
    def size_bytes(self, array: Any) -> int:
        """The number of bytes of an array."""

    @abstractmethod
    def bytes_of(self, array: Any) -> Bytes:
        """The bytes of an array: a view of its memory or a copy."""

    @abstractmethod
    def overwrite(self, array: Any, data: Bytes) -> None:
        """Replaces the elements of an array; no gradient flows through."""

    @abstractmethod
    def make(self, kind: ArrayKind, data: bytearray | None = None) -> Any:
        """A new array in host memory, with these bytes; without `data` its elements are arbitrary."""

    @abstractmethod
    def host_copy(self, array: Any) -> Any:
        """A copy of an array in host memory, in the order of its indices."""

    @abstractmethod
    def copy(self, array: Any) -> Any:
        """A copy of an array that `make` or `host_copy` has returned."""

    @abstractmethod
    def kind_size_bytes(self, kind: ArrayKind) -> int:
        """The number of bytes of an array of this kind."""
