"""The tensors of a collective as the core reads and writes them: in the host's memory, one element after the other."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable

import torch

from poseidon import _core
from poseidon.errors import InvalidArgument
from poseidon.torch.tensors.compatibility import unnamed
from poseidon.torch.tensors.devices import Submitted, is_accelerator, pinned, to_device, to_host

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
    plain = _plain(tensor.detach()).contiguous()
    return to_host(plain) if is_accelerator(plain.device) else plain


def writable(tensor: torch.Tensor) -> tuple[torch.Tensor, Finish | None]:
    """Memory for the tensor's elements, and what writes it to the tensor where that is another one.

    It has any content. `finish` may be called by any thread: the copy to a device is on that thread's current stream.
    """
    return _with_finish(tensor, _room)


def changeable(tensor: torch.Tensor) -> tuple[torch.Tensor, Finish | None]:
    """The same for memory that has the tensor's elements already."""
    return _with_finish(tensor, readable)


def _with_finish(
    tensor: torch.Tensor, memory_of: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, Finish | None]:
    own = tensor.detach()
    on_device = is_accelerator(own.device)
    memory = memory_of(own)
    if not on_device and memory.data_ptr() == own.data_ptr() and own.is_contiguous():
        return memory, None
    before = Submitted(own.device) if on_device else None

    def finish() -> None:
        result = torch.view_as_complex(memory) if own.is_complex() else memory
        result = result.view(own.dtype) if result.dtype != own.dtype else result
        if before is None:
            own.copy_(result)
        else:
            to_device(result, own, before)

    return memory, finish


def _room(own: torch.Tensor) -> torch.Tensor:
    """Memory for the elements: the tensor's own where it can be, or new."""
    plain = _plain(own)
    if is_accelerator(own.device):
        return pinned(plain)
    return plain if plain.is_contiguous() else torch.empty(plain.shape, dtype=plain.dtype)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements without names, lazy bits, and types that the core and DLPack do not know."""
    if tensor.is_meta:
        raise InvalidArgument("a tensor on the meta device has no elements: give it memory first, as by to_empty()")
    tensor = unnamed(tensor).resolve_conj().resolve_neg()
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    if tensor.dtype == torch.bool or tensor.dtype not in ELEMENTS:
        return tensor.contiguous().view(torch.uint8)
    return tensor
