"""How tensors lie in memory: the views that the core reads and writes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import to_dlpack

from poseidon.torch.tensors.compatibility import unnamed

DTYPE_NAMES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
"""Dtypes of parameters that can be exchanged, and the core's names for them."""


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements, in the order of its indices, as a 1-D uint8 tensor: a view of its memory or a copy."""
    # Conjugate and negative views show other values than lie in their memory.
    return unnamed(tensor.detach()).resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def host_bytes(tensor: torch.Tensor) -> Any:
    """The same in the host's memory, as a NumPy array that is only read."""
    # Not numpy(), which marks the memory for ever: nobody could tell it from memory that NumPy has (`ownership.py`).
    return np.from_dlpack(byte_view(tensor).cpu())


def held_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements; of a sparse one also those of its indices."""
    return tensor._indices().nbytes + tensor._values().nbytes if tensor.is_sparse else tensor.nbytes


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements fill one block of memory without gaps or overlaps, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape have their elements in the same order in memory."""
    return all(size <= 1 or left == right for size, left, right in zip(a.shape, a.stride(), b.stride(), strict=True))


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor as a 1-D tensor, in storage order."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def borrowed(tensor: torch.Tensor) -> Any:
    """The memory of a CPU tensor that needs no gradient, for one call of the core, as a DLPack capsule.

    Given the tensor, the binding would call its `__dlpack__`, which is Python, and lose a Ctrl-C that comes in it.
    """
    return to_dlpack(tensor)


def exchangeable(grad: torch.Tensor, layout: torch.Tensor) -> bool:
    """Whether `grad` can be sent from its own memory, given the layout that all ranks agreed on."""
    # A negative view shows other values than lie in its memory.
    return grad.dtype == layout.dtype and not grad.is_neg() and is_dense(grad) and same_layout(grad, layout)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two dense tensors of one shape have the same dtype and the same bits, those of NaN, too."""
    return left.dtype == right.dtype and torch.equal(*(byte_view(one.contiguous()) for one in (left, right)))
