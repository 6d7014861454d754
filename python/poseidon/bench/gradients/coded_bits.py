"""How many bits a lossless coder of blocks needs: the reference by which samples and filled gradients are compared.

A block has 256 values. Signs and mantissas go as they are. Each exponent goes as its distance below the block's largest
one, in as few bits as most of the block needs; larger distances follow in a byte each. A block of zeros takes a byte,
and up to 256 of them in a row take two. A block that would not shrink, and what is left over, go as they are.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Format = Literal["fp32", "fp16", "bf16"]
FORMATS: tuple[Format, ...] = ("fp32", "fp16", "bf16")

BLOCK = 256  # values
_HEAD_BYTES = 3  # the width, the largest exponent, the number of escapes
_MOST_WIDTH, _MOST_ESCAPES = 5, 255
_MANTISSA_BITS = {"fp32": 23, "fp16": 10, "bf16": 7}
_EXPONENT_BITS = {"fp32": 8, "fp16": 5, "bf16": 8}
_ZERO_RUN = 256  # blocks


def as_words(values: NDArray[np.float32], form: Format) -> NDArray[np.unsignedinteger]:
    """The bits of each value, rounded to `form`: uint32 of fp32, else uint16. NaNs are not expected."""
    if form == "fp16":
        return values.astype(np.float16).view(np.uint16)
    words = np.ascontiguousarray(values).view(np.uint32)
    if form == "fp32":
        return words
    return ((words + np.uint32(0x7FFF) + (words >> 16 & 1)) >> 16).astype(np.uint16)


def coded_bits(values: NDArray[np.float32], form: Format = "fp32") -> float:
    """The bits that `values`, in the order of their memory, take as `form` when they are coded."""
    words = as_words(values.reshape(-1), form)
    whole = words.size // BLOCK * BLOCK
    blocks = words[:whole].reshape(-1, BLOCK)
    is_zero = np.logical_not(np.any(blocks, axis=1, keepdims=True)).reshape(-1)
    sizes = _block_bytes(blocks[~is_zero], form)
    return 8.0 * (float(sizes.sum()) + _zero_bytes(is_zero) + (words.size - whole) * words.itemsize)


def _block_bytes(blocks: NDArray[np.unsignedinteger], form: Format) -> NDArray[np.int64]:
    exponents = (blocks >> _MANTISSA_BITS[form] & (1 << _EXPONENT_BITS[form]) - 1).astype(np.int16)
    distances = exponents.max(axis=1, keepdims=True, initial=0) - exponents
    best = np.where(distances.any(axis=1), BLOCK * blocks.itemsize, 0)
    for width in range(1, _MOST_WIDTH + 1):
        escapes = (distances >= (1 << width) - 1).sum(axis=1)
        size = np.where(escapes <= _MOST_ESCAPES, width * BLOCK // 8 + escapes, BLOCK * blocks.itemsize)
        best = np.minimum(best, size)
    plain = BLOCK * blocks.itemsize
    coded = _HEAD_BYTES + BLOCK * (1 + _MANTISSA_BITS[form]) // 8 + best
    return np.where(coded < plain, coded, 1 + plain)


def _zero_bytes(is_zero: NDArray[np.bool_]) -> int:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], is_zero, [False]]).astype(np.int8)))
    total = 0
    for run in (edges[1::2] - edges[::2]).tolist():
        total += run // _ZERO_RUN * 2 + min(2, run % _ZERO_RUN)
    return total
