"""Who can reach a tensor's memory. Only of memory that nobody else can reach is it certain that nobody writes to it.

Version counters do not tell: NumPy, DLPack, `.data` and other processes write without raising them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch

_storage_use_count: Any = torch._C._storage_Use_Count


def holders(tensor: torch.Tensor) -> int:
    """How many tensors have the memory of this one, which is not sparse. It is one of them."""
    return _count(tensor) - _OWN


def _count(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    return _storage_use_count(storage._cdata)  # type: ignore[no-any-return]


_OWN = _count(torch.empty(1)) - 1  # the storage's object in Python
_COUNTS_USES = hasattr(torch.Tensor, "_use_count")


def _uses_of_a_base() -> int:
    view = torch.empty(1).view(1)
    base: Any = view._base
    return base._use_count() if _COUNTS_USES else 0


_USES_OF_A_BASE = _uses_of_a_base()


def _uses_of_a_parameter() -> int:
    param: Any = torch.nn.Parameter(torch.empty(1))
    node = torch.autograd.graph.get_gradient_edge(param).node
    return param._use_count() if _COUNTS_USES and node is not None else 0


_USES_OF_A_PARAMETER = _uses_of_a_parameter()


def is_held(param: torch.Tensor) -> bool:
    """Whether others than Python have the parameter, whose gradient's node exists, such as a program of torch.jit's."""
    tensor: Any = param
    return _COUNTS_USES and tensor._use_count() > _USES_OF_A_PARAMETER


def is_allocated(tensor: torch.Tensor) -> bool:
    """Whether PyTorch has allocated the memory, for this process alone, and NumPy has never been given it.

    False also of what `torch.load` has made.
    """
    storage = tensor.untyped_storage()
    return storage.resizable() and not is_shared(tensor)


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether other processes may have the memory, too."""
    return tensor.device.type == "cpu" and tensor.untyped_storage().is_shared()


def fading_holders(grad: torch.Tensor, arrived: torch.Tensor | None) -> int:
    """How many tensors that autograd is about to drop have the memory of `grad`, which is not sparse.

    `arrived` is what it is adding to `.grad`, if it is doing so. It may become `.grad` without a copy.
    """
    if arrived is None or arrived.layout != torch.strided or arrived.data_ptr() != grad.data_ptr():
        return 0
    base: Any = arrived._base
    return 2 if base is not None and _COUNTS_USES and base._use_count() == _USES_OF_A_BASE else 1


class HasGradient(Protocol):
    """An object that has a gradient."""

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient. Nobody but the object and its parameter is to have a reference to it."""


class Hold:
    """What an exchange that has just begun knows of the gradient that was in `.grad` then."""

    def __init__(self, grad: torch.Tensor, alone: bool, fading: int) -> None:
        """`alone`: nobody else had its memory just before, but `fading` tensors that autograd is about to drop."""
        self._version = grad._version
        self._alone = alone
        self._most_holders = 0 if grad.is_sparse else holders(grad) - fading

    def is_untouched(self, grad: torch.Tensor) -> bool:
        """Whether nobody has written to the gradient through PyTorch since.

        It is not known of one that has its memory with others, such as parts of one flat tensor: all have one counter.
        """
        return not self._alone or grad._version == self._version

    def is_sole(self, holder: HasGradient) -> bool:
        """With backward over and the gradient still in `.grad`: whether nobody else can reach it."""
        return self._alone and _references(holder) == _SOLE and self.lost_others(holder.grad)

    def lost_others(self, grad: torch.Tensor | None) -> bool:
        """With backward over: whether the tensors that autograd was about to drop are gone."""
        return grad is None or grad.is_sparse or holders(grad) <= self._most_holders


def _references(holder: HasGradient) -> tuple[int, int]:
    """References of Python and of PyTorch to the gradient."""
    grad: Any = holder.grad
    return sys.getrefcount(grad), grad._use_count() if _COUNTS_USES else 0


@dataclass
class _Holder:
    grad: torch.Tensor | None


def is_referred_to(param: HasGradient) -> bool:
    """Whether anybody but the parameter refers to the tensor in its `.grad`, which is not None."""
    return _references(_Holder(param.grad)) != _SOLE


_SAMPLES = 1024


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """Copies of about so many numbers of a tensor that is not sparse, as bytes. They are from all rows and columns."""
    places = torch.arange(0, tensor.numel(), tensor.numel() // _SAMPLES | 1, device=tensor.device)
    found = tensor.detach()[torch.unravel_index(places, tensor.shape)] if tensor.dim() else tensor.detach().clone()
    return found.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)


def _sole_references() -> tuple[int, int]:
    param = torch.nn.Parameter(torch.empty(1))
    param.grad = torch.empty(1)
    return _references(_Holder(param.grad))


_SOLE = _sole_references()


def reachable(
    params: Iterable[torch.Tensor], family: Iterable[torch.Tensor], passed_over: Mapping[int, int]
) -> list[torch.Tensor]:
    """Those of `params` whose memory other tensors have, too, but for those of `family` that share no element.

    `passed_over`: how many holders of a storage, by `storage_of`, do not count.
    """

    def counted(param: torch.Tensor) -> int:
        return holders(param) - passed_over.get(storage_of(param), 0)

    suspects = [param for param in params if counted(param) > 1]
    if not suspects:
        return []
    places: dict[int, list[torch.Tensor]] = {}
    for param in family:
        places.setdefault(storage_of(param), []).append(param)
    with_neighbours = [(param, places[storage_of(param)]) for param in suspects]
    return [param for param, near in with_neighbours if counted(param) > len(near) or not _is_apart(param, near)]


def storage_of(tensor: torch.Tensor) -> int:
    """Equal for tensors that have one memory."""
    return tensor.untyped_storage()._cdata


def _is_apart(param: torch.Tensor, neighbours: list[torch.Tensor]) -> bool:
    begin, end = _extent(param)
    return all(one is param or end <= _extent(one)[0] or _extent(one)[1] <= begin for one in neighbours)


def first_overlap(params: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Two of these tensors that have elements in common, if there are such."""
    suspects = sorted((param for param in params if holders(param) > 1), key=_extent)
    return next((pair for pair in pairwise(suspects) if _extent(pair[0])[1] > _extent(pair[1])[0]), None)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses between which its elements lie."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()
