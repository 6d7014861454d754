"""The interfaces to a framework's arrays: `Arrays` for other ranks, `StateArrays` for files and replacements, too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

ArrayKind = tuple[str, tuple[int, ...]]
"""The name of an array's dtype, a key of `StateArrays.dtypes`, and its shape."""

Bytes = NDArray[np.uint8]
"""Bytes in host memory, in one dimension."""


class Arrays(Protocol):
    """Turns a framework's arrays into bytes for other ranks, and back. Stateless; any thread may use it.

    The bytes of an array are its elements in the order of its indices, without gaps, whatever the array's own layout
    and device.
    """

    def size_bytes(self, array: Any) -> int:
        """The number of bytes of an array."""

    def bytes_of(self, array: Any) -> Bytes:
        """The bytes of an array: a view of its memory or a copy."""

    def overwrite(self, array: Any, data: Bytes) -> None:
        """Replaces the elements of an array. No gradient flows through this."""


@runtime_checkable
class StateArrays(Arrays, Protocol):
    """What a framework whose state is sent and saved (`state_text.py`) implements, too."""

    dtypes: Mapping[str, Any] = {}
    """The framework's dtypes that a state may have, by the names that they have in messages and files."""

    tuples: tuple[type, ...] = (tuple,)
    """The types of shapes and the like, which a state gives back as plain tuples."""

    def kind_of(self, value: Any) -> ArrayKind | None:
        """The kind of an array that a state may contain, or None for every other value."""

    def describe(self, value: Any) -> str:
        """A text that says what `value` is, for the error about a value that no state may contain."""
        return type(value).__name__

    def parts_of(self, value: Any) -> list[Any] | None:
        """Plain data and arrays of which `of_parts` makes the value again. None for a value that has no such parts."""
        return None

    def of_parts(self, parts: list[Any]) -> Any:
        """The value that `parts_of` has taken apart. Raises ValueError for other parts."""
        raise ValueError("there are no values of parts")

    def make(self, kind: ArrayKind, data: bytearray | None = None) -> Any:
        """A new array in host memory with these bytes. Without `data` its elements are arbitrary."""

    def host_copy(self, array: Any) -> Any:
        """A copy of an array in host memory, in the order of its indices."""

    def copy(self, array: Any) -> Any:
        """A copy of an array that `make` or `host_copy` has returned."""

    def kind_size_bytes(self, kind: ArrayKind) -> int:
        """The number of bytes of an array of this kind."""
        name, shape = kind
        return math.prod(shape) * int(self.dtypes[name].itemsize)
