"""How many bits numbers take when the core codes them without loss (docs/coding.md)."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from poseidon import _core

Format = Literal["fp32", "fp16", "bf16"]
FORMATS: tuple[Format, ...] = ("fp32", "fp16", "bf16")
DTYPES: dict[Format, str] = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
VALUE_BITS: dict[Format, int] = {"fp32": 32, "fp16": 16, "bf16": 16}

BLOCK = 256  # values


def as_words(values: NDArray[np.float32], form: Format) -> NDArray[np.unsignedinteger]:
    """The bits of each value, rounded to `form`: uint32 of fp32, else uint16. NaNs are not expected."""
    if form == "fp16":
        return values.astype(np.float16).view(np.uint16)
    words = np.ascontiguousarray(values).view(np.uint32)
    if form == "fp32":
        return words
    return ((words + np.uint32(0x7FFF) + (words >> 16 & 1)) >> 16).astype(np.uint16)


def coded_bits(values: NDArray[np.float32], form: Format = "fp32") -> int:
    """The bits that `values`, in the order of their memory, take as `form` when they are coded."""
    return 8 * _core.coded_bytes(as_words(values.reshape(-1), form), DTYPES[form])


def difference_bits(values: NDArray[np.float32], base: NDArray[np.float32], form: Format = "fp32") -> int:
    """The bits that `values`, rounded to `form`, take when they are told to somebody who has `base`, rounded alike."""
    words, before = (as_words(array.reshape(-1), form) for array in (values, base))
    return 8 * _core.coded_difference_bytes(words, before, DTYPES[form])
