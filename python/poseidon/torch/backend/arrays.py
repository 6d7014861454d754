"""The tensors of a collective as the core reads and writes them: in the host's memory, one element after the other."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable

import torch

from poseidon import _core
from poseidon.errors import InvalidArgument
from poseidon.torch.tensors.compatibility import unnamed

Element = _core.Element

ELEMENTS = {
    torch.float32: Element.float32,
    torch.float64: Element.float64,
    torch.float16: Element.float16,
    torch.bfloat16: Element.bfloat16,
    torch.int8: Element.int8,
    torch.uint8: Element.uint8,
    torch.bool: Element.uint8,
    torch.int16: Element.int16,
    torch.int32: Element.int32,
    torch.int64: Element.int64,
}
"""What the elements of a tensor are reduced as."""

Finish = Callable[[], None]


@functools.cache
def label_of(dtype: torch.dtype) -> int:
    """A number by which ranks find out that they call a collective with other dtypes."""
    return zlib.crc32(str(dtype).encode())


def check_dtypes(caller: str, tensors: Iterable[torch.Tensor]) -> torch.dtype:
    """The one dtype of these tensors. Raises InvalidArgument if they have several, or none."""
    found = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
    if len(found) != 1:
        raise InvalidArgument(f"{caller} got tensors of {' and '.join(found) or 'no dtype'}: give all of one dtype")
    return next(tensor.dtype for tensor in tensors)


def element_of(tensor: torch.Tensor) -> Element:
    """What the elements are as far as coding is concerned: bytes where the core has no name for them."""
    dtype = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
    return ELEMENTS.get(dtype, Element.uint8)


def reduced_element(caller: str, tensor: torch.Tensor) -> Element:
    """What the elements are reduced as. InvalidArgument where there is no such thing."""
    dtype = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
    if dtype not in ELEMENTS:
        raise InvalidArgument(f"{caller} cannot reduce a tensor of {tensor.dtype}: convert it first, as tensor.float()")
    return ELEMENTS[dtype]


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements in the host's memory: the tensor's own memory, or a copy."""
    return _plain(tensor.detach().cpu()).contiguous()


def writable(tensor: torch.Tensor) -> tuple[torch.Tensor, Finish | None]:
    """Memory for the tensor's elements, which has them, and what writes it to the tensor where that is another one."""
    own = tensor.detach()
    memory = readable(own)
    if memory.data_ptr() == own.data_ptr() and own.is_contiguous() and own.device.type == "cpu":
        return memory, None

    def finish() -> None:
        result = torch.view_as_complex(memory) if own.is_complex() else memory
        own.copy_(result.view(own.dtype) if result.dtype != own.dtype else result)

    return memory, finish


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements without names, lazy bits, and types that the core and DLPack do not know."""
    tensor = unnamed(tensor).resolve_conj().resolve_neg()
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    if tensor.dtype == torch.bool or tensor.dtype not in ELEMENTS:
        return tensor.contiguous().view(torch.uint8)
    return tensor
