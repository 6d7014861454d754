"""State as text and tensors: how it goes to another process or to a file, without pickle.

The text is JSON: what JSON has stands for itself, everything else is an object with one key, its kind.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from poseidon.errors import InvalidArgument

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex128,
        torch.complex64,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

TensorKind = tuple[torch.dtype, tuple[int, ...]]
"""A tensor's dtype and shape."""


def encode(value: Any) -> tuple[str, list[torch.Tensor]]:
    """`value` as text and the tensors in it. InvalidArgument, with the place, for what is no plain data."""
    tensors: list[torch.Tensor] = []
    tree = _encode(value, tensors, "")
    kinds = [[_NAMES[tensor.dtype], list(tensor.shape)] for tensor in tensors]
    return json.dumps({"tensors": kinds, "value": tree}), tensors


def tensor_kinds(text: str) -> list[TensorKind]:
    """Dtype and shape of each tensor that goes with the text. ValueError for what is no such text."""
    try:
        kinds = [(DTYPES[name], tuple(shape)) for name, shape in json.loads(text)["tensors"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"not the text of a state: {error!r}") from None
    if not all(isinstance(size, int) and size >= 0 for _, shape in kinds for size in shape):
        raise ValueError("not the text of a state: a tensor has no such shape")
    return kinds


def decode(text: str, tensors: Sequence[torch.Tensor]) -> Any:
    """What `encode` was given, with these tensors in it. ValueError for what is no such text."""
    try:
        return _decode(json.loads(text)["value"], tensors)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"not the text of a state: {error!r}") from None


def _encode(value: Any, tensors: list[torch.Tensor], place: str) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_encode(part, tensors, f"{place}[{index}]") for index, part in enumerate(value)]
    if isinstance(value, torch.Tensor) and value.dtype in _NAMES and value.layout == torch.strided:
        tensors.append(value.detach())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, dict):
        kind = _DICT_KINDS.get(type(value), "dict")
        return {kind: [_pair(key, part, tensors, place) for key, part in value.items()]}
    if type(value) in (tuple, torch.Size):
        return {"tuple": _encode(list(value), tensors, place)}
    if type(value) is set:
        return {"set": _encode(list(value), tensors, place)}
    if type(value) is bytes:
        return {"bytes": value.hex()}
    if isinstance(value, torch.dtype) and value in _NAMES:
        return {"dtype": _NAMES[value]}
    what = f"{value.dtype} tensor" if isinstance(value, torch.Tensor) else type(value).__name__
    raise InvalidArgument(
        f"state{place} is a {what}, which is not sent to other workers or kept on disk: numbers, texts, dense tensors, "
        "and lists, tuples, sets and dicts of such are"
    )


def _pair(key: Any, part: Any, tensors: list[torch.Tensor], place: str) -> list[Any]:
    return [_encode(key, tensors, place), _encode(part, tensors, f"{place}[{key!r}]")]


_DICT_KINDS: dict[type, str] = {OrderedDict: "ordered dict", Counter: "counter"}


def _decode(tree: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(tree, list):
        return [_decode(part, tensors) for part in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    return _KINDS[kind](content, tensors)


def _pairs(content: Any, tensors: Sequence[torch.Tensor]) -> list[tuple[Any, Any]]:
    return [(_decode(key, tensors), _decode(part, tensors)) for key, part in content]


_KINDS: dict[str, Callable[[Any, Sequence[torch.Tensor]], Any]] = {
    "tensor": lambda content, tensors: tensors[content],
    "dict": lambda content, tensors: dict(_pairs(content, tensors)),
    "ordered dict": lambda content, tensors: OrderedDict(_pairs(content, tensors)),
    "counter": lambda content, tensors: Counter(dict(_pairs(content, tensors))),
    "tuple": lambda content, tensors: tuple(_decode(content, tensors)),
    "set": lambda content, tensors: set(_decode(content, tensors)),
    "bytes": lambda content, tensors: bytes.fromhex(content),
    "dtype": lambda content, tensors: DTYPES[content],
}
