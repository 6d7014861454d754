"""PyTorch's tensors for the framework-free code."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from poseidon.adapter.arrays import ArrayKind, Bytes, StateArrays
from poseidon.torch.tensors.compatibility import unnamed
from poseidon.torch.tensors.memory import host_bytes

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


class TensorArrays(StateArrays):
    """Tensors of any device and memory format. A sparse one is its indices and values."""

    dtypes = DTYPES
    tuples = (tuple, torch.Size)

    def kind_of(self, value: Any) -> ArrayKind | None:
        if isinstance(value, torch.Tensor) and value.dtype in _NAMES and value.layout == torch.strided:
            return _NAMES[value.dtype], tuple(value.shape)
        return None

    def describe(self, value: Any) -> str:
        return f"{value.dtype} tensor" if isinstance(value, torch.Tensor) else type(value).__name__

    def parts_of(self, value: Any) -> list[Any] | None:
        if not isinstance(value, torch.Tensor) or value.layout != torch.sparse_coo:
            return None
        value = value.detach()
        # As they are: the order of rows decides in which order an update adds what an index has several times.
        return [value._indices(), value._values(), list(value.shape), value.is_coalesced()]

    def of_parts(self, parts: list[Any]) -> torch.Tensor:
        indices, values, shape, is_coalesced = parts
        return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)._coalesced_(is_coalesced)

    def size_bytes(self, array: torch.Tensor) -> int:
        return array.nbytes

    def bytes_of(self, array: torch.Tensor) -> Bytes:
        return host_bytes(array)  # type: ignore[no-any-return]

    def overwrite(self, array: torch.Tensor, data: Bytes) -> None:
        target = unnamed(array.detach())
        source = torch.from_numpy(data).view(array.dtype).view(array.shape)
        for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
            if stride == 0 and size > 1:  # an expanded tensor has these elements once
                target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
        with torch.inference_mode() if target.is_inference() else nullcontext():
            target.copy_(source)

    def make(self, kind: ArrayKind, data: bytearray | None = None) -> torch.Tensor:
        name, shape = kind
        if not data:
            return torch.empty(shape, dtype=DTYPES[name])
        return torch.frombuffer(data, dtype=DTYPES[name]).view(shape)

    def host_copy(self, array: torch.Tensor) -> torch.Tensor:
        return array.detach().to("cpu", copy=True).contiguous()

    def copy(self, array: torch.Tensor) -> torch.Tensor:
        return array.clone()


TENSORS = TensorArrays()
