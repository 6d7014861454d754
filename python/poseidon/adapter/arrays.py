"""`Arrays`: the interface to a framework's arrays. Each framework implements it once."""

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
    """Turns a framework's arrays into bytes for other ranks and for files. Stateless; any thread may use it.

    The bytes of an array are its elements in the order of its indices, without gaps, whatever the array's own layout
    and device.
    """

    dtypes: Mapping[str, Any] = {}
    """The framework's dtypes that a state may have, by the names that they have in messages and files."""

    tuples: tuple[type, ...] = (tuple,)
    """The types of shapes and the like, which a state gives back as plain tuples."""

    @abstractmethod
    def kind_of(self, value: Any) -> ArrayKind | None:
        """The kind of an array that a state may contain, or None for every other value."""

    @abstractmethod
    def describe(self, value: Any) -> str:
        """A text that says what `value` is, for the error about a value that no state may contain."""

    @abstractmethod
    def size_bytes(self, array: Any) -> int:
        """The number of bytes of an array."""

    @abstractmethod
    def bytes_of(self, array: Any) -> Bytes:
        """The bytes of an array: a view of its memory or a copy."""

    @abstractmethod
    def overwrite(self, array: Any, data: Bytes) -> None:
        """Replaces the elements of an array. No gradient flows through this."""

    @abstractmethod
    def make(self, kind: ArrayKind, data: bytearray | None = None) -> Any:
        """A new array in host memory with these bytes. Without `data` its elements are arbitrary."""

    @abstractmethod
    def host_copy(self, array: Any) -> Any:
        """A copy of an array in host memory, in the order of its indices."""

    @abstractmethod
    def copy(self, array: Any) -> Any:
        """A copy of an array that `make` or `host_copy` has returned."""

    @abstractmethod
    def kind_size_bytes(self, kind: ArrayKind) -> int:
        """The number of bytes of an array of this kind."""
