"""The stand-in in `.grad` while the gradient itself has not arrived yet."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from poseidon.errors import PoseidonError
from poseidon.torch.tensors.compatibility import leave_uncompiled, leave_untraced
from poseidon.torch.tensors.watched import METADATA, without_torch_function

_LAYOUT = (torch.Tensor.layout.__get__, torch.Tensor.is_sparse.__get__)  # type: ignore[attr-defined]


class GradientGone(PoseidonError):
    """The gradient that a stand-in stood for cannot be had any more."""


class PendingGradient(torch.Tensor):
    """Stands in `.grad` for a gradient that is still to be computed, or on its way.

    The first operation that needs its values calls `resolve()`, which returns the gradient and puts it into `.grad`
    instead of this object. So an optimizer, clipping or a print sees what plain PyTorch would show. It takes the memory
    of one element.
    """

    value: torch.Tensor | None
    """The gradient, once somebody has asked for it, or has brought it."""

    _resolve: Callable[[PendingGradient], torch.Tensor]
    _zero_later: Callable[[], bool] | None
    _may_be_sparse: bool

    @classmethod
    def make(
        cls,
        param: torch.Tensor,
        resolve: Callable[[PendingGradient], torch.Tensor],
        zero_later: Callable[[], bool] | None = None,
        may_be_sparse: bool = False,
    ) -> Any:
        """The stand-in for the gradient of `param`.

        `resolve` is called with the stand-in; `zero_later()`: whether zeroing it now needs no values, and is noted.
        `may_be_sparse`: whether it is sparse is known only when it is there.
        """
        _leave_untraced(cls)
        pending = _blank(param.shape, param.dtype, param.device).as_subclass(cls)
        pending.value, pending._resolve = None, resolve
        pending._zero_later, pending._may_be_sparse = zero_later, may_be_sparse
        return pending

    def resolve(self) -> torch.Tensor:
        """The gradient itself, which is asked for once."""
        if self.value is None:
            self.value = self._resolve(self)
        return self.value

    def zeroes_later(self) -> bool:
        """Notes that it is to be zeros, if that needs no values now; whether it did."""
        return self._zero_later is not None and self._zero_later()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in METADATA and not (func in _LAYOUT and args[0]._may_be_sparse):
            with without_torch_function():
                return func(*args, **(kwargs or {}))
        return _answered(func, args, kwargs or {})


@torch._disable_dynamo  # what waits for a gradient is not to be compiled with who looks at it
def _answered(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is torch.Tensor.zero_ and _zeroes_later(args[0]):
        return args[0]
    if func is torch._foreach_zero_:
        args = ([grad for grad in args[0] if not _zeroes_later(grad)],)
        if not args[0]:  # it refuses an empty list
            return None
    args, kwargs = tree_map(_resolved, (args, kwargs))
    return func(*args, **kwargs)


@functools.cache
def _leave_untraced(kind: type[PendingGradient]) -> None:
    leave_untraced(kind)
    leave_uncompiled(PendingGradient.__torch_function__.__func__)  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=4096)
def _blank(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What who does not ask `__torch_function__` reads, such as a scripted function: no number, rather than zeros."""
    no_number = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), no_number, dtype=dtype, device=device).expand(shape)


def _zeroes_later(value: Any) -> bool:
    return isinstance(value, PendingGradient) and value.zeroes_later()


def _resolved(value: Any) -> Any:
    return value.resolve() if isinstance(value, PendingGradient) else value
