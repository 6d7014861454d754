"""Turns a state into text and arrays for another process or a file, without pickle.

The text is JSON. Values that JSON knows stand for themselves. Every other value is an object with one key, its kind.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from poseidon.adapter.arrays import ArrayKind, StateArrays
from poseidon.adapter.control import Control
from poseidon.errors import InvalidArgument


def encode(value: Any, arrays: StateArrays) -> tuple[str, list[Any]]:
    """`value` as text, and the arrays in it. Raises InvalidArgument, naming the place, for what is no plain data."""
    found: list[Any] = []
    tree = _Encoder(arrays, found).tree(value, "")
    kinds = [arrays.kind_of(array) for array in found]
    return json.dumps({"tensors": kinds, "value": tree}), found


def array_kinds(text: str, arrays: StateArrays) -> list[ArrayKind]:
    """The kind of each array that belongs to the text. Raises ValueError for a text that `encode` does not make."""
    try:
        kinds = [(name, tuple(shape)) for name, shape in json.loads(text)["tensors"]]
        known = all(name in arrays.dtypes for name, _ in kinds)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not the text of a state: {error!r}") from None
    if not known:
        raise ValueError("not the text of a state: an array has no such dtype")
    if not all(isinstance(size, int) and size >= 0 for _, shape in kinds for size in shape):
        raise ValueError("not the text of a state: an array has no such shape")
    return kinds


def decode(text: str, found: Sequence[Any], arrays: StateArrays) -> Any:
    """The value that was encoded, with these arrays in it. Raises ValueError for a text that `encode` does not make."""
    try:
        return _Decoder(arrays, found).value(json.loads(text)["value"])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        raise ValueError(f"not the text of a state: {error!r}") from None


def broadcast(value: Any, control: Control, root: int) -> Any:
    """Returns rank `root`'s `value` on every rank. The others pass None. Collective.

    Arrays arrive as new arrays in host memory, so nothing that exists is changed before all has arrived.
    """
    arrays = control.arrays
    assert isinstance(arrays, StateArrays)
    text, sent = ("", []) if value is None else encode(value, arrays)
    data = text.encode()
    block = np.empty(control.sum([len(data)])[0], np.uint8)
    if data:
        block[:] = np.frombuffer(data, np.uint8)
    control.broadcast_bytes(block, root)
    if data:
        control.broadcast(sent, root)
        return value
    text = block.tobytes().decode()
    received = [arrays.make(kind) for kind in array_kinds(text, arrays)]
    control.broadcast(received, root)
    return decode(text, received, arrays)


class _Encoder:
    """Notes the arrays that it meets in `found`."""

    def __init__(self, arrays: StateArrays, found: list[Any]) -> None:
        self._arrays = arrays
        self._found = found
        self._names = {dtype: name for name, dtype in arrays.dtypes.items()}

    def tree(self, value: Any, place: str) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, list):
            return [self.tree(part, f"{place}[{index}]") for index, part in enumerate(value)]
        if self._arrays.kind_of(value) is not None:
            self._found.append(value)
            return {"tensor": len(self._found) - 1}
        if (parts := self._arrays.parts_of(value)) is not None:
            return {"parts": self.tree(parts, place)}
        if isinstance(value, dict):
            kind = _DICT_KINDS.get(type(value), "dict")
            return {kind: [[self.tree(k, place), self.tree(v, f"{place}[{k!r}]")] for k, v in value.items()]}
        if type(value) in self._arrays.tuples:
            return {"tuple": self.tree(list(value), place)}
        if type(value) is set:
            return {"set": self.tree(list(value), place)}
        if type(value) is bytes:
            return {"bytes": value.hex()}
        if type(value) in map(type, self._names) and value in self._names:
            return {"dtype": self._names[value]}
        raise InvalidArgument(
            f"state{place} is a {self._arrays.describe(value)}, which cannot be sent to other workers or saved: "
            "use numbers, texts, tensors (dense, or sparse in COO form), and lists, tuples, sets and dicts of these"
        )


_DICT_KINDS: dict[type, str] = {OrderedDict: "ordered dict", Counter: "counter"}


@dataclass(frozen=True)
class _Decoder:
    """Puts `found` back where the text says."""

    arrays: StateArrays
    found: Sequence[Any]

    def value(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.value(part) for part in tree]
        if not isinstance(tree, dict):
            return tree
        ((kind, content),) = tree.items()
        return _KINDS[kind](self, content)

    def pairs(self, content: Any) -> list[tuple[Any, Any]]:
        return [(self.value(key), self.value(part)) for key, part in content]


_KINDS: dict[str, Callable[[_Decoder, Any], Any]] = {
    "tensor": lambda decoder, content: decoder.found[content],
    "parts": lambda decoder, content: decoder.arrays.of_parts(decoder.value(content)),
    "dict": lambda decoder, content: dict(decoder.pairs(content)),
    "ordered dict": lambda decoder, content: OrderedDict(decoder.pairs(content)),
    "counter": lambda decoder, content: Counter(dict(decoder.pairs(content))),
    "tuple": lambda decoder, content: tuple(decoder.value(content)),
    "set": lambda decoder, content: set(decoder.value(content)),
    "bytes": lambda decoder, content: bytes.fromhex(content),
    "dtype": lambda decoder, content: decoder.arrays.dtypes[content],
}
