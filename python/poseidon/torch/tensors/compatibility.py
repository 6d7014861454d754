"""Differences of older versions of torch. Poseidon needs torch 2.4 or newer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

import torch
from torch.autograd import graph


def _takes_several(function: Any) -> bool:
    try:
        function((torch.empty(0),))
    except (RuntimeError, AttributeError, TypeError):
        return False
    return True


_INCREMENTS_SEVERAL = _takes_several(graph.increment_version)  # since torch 2.5
compiler: Any = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
"""Returns what compiles the functions that are called now, as inside torch.compile. None in older versions."""

_preserve: Any = torch.autograd._unsafe_preserve_version_counter
_PRESERVES_SEVERAL = _takes_several(_preserve)


def increment_version(tensors: Sequence[torch.Tensor]) -> None:
    """Tells autograd that these have changed. One call for all where torch takes several, since each is slow."""
    if _INCREMENTS_SEVERAL:
        graph.increment_version(tensors)
        return
    for tensor in tensors:
        graph.increment_version(tensor)


def preserved_versions(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
    """Context in which writing to these is not seen by autograd."""
    if _PRESERVES_SEVERAL:
        return _preserve(tuple(tensors))  # type: ignore[no-any-return]
    contexts = ExitStack()
    for tensor in tensors:
        contexts.enter_context(_preserve(tensor))
    return contexts


def unnamed(tensor: Any) -> torch.Tensor:
    """The same tensor without names of its dimensions, which older versions of torch have."""
    return tensor.rename(None) if getattr(tensor, "has_names", bool)() else tensor  # type: ignore[no-any-return]


def call_before_compiling(function: Callable[..., None]) -> None:
    """Has torch.compile call this function whenever it begins to compile another one, until it is reset."""
    from torch._dynamo.callback import callback_handler

    if function not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(function)


def leave_uncompiled(function: Any) -> None:
    """Has torch.compile leave this function's own code, or this code, alone. It still looks at what that calls."""
    from torch._dynamo.eval_frame import skip_code  # slow to import, as every optimizer of torch does

    skip_code(getattr(function, "__code__", function))


def leave_untraced(kind: type) -> None:
    """Has torch.compile run operations on tensors of this class, and not trace them."""
    from torch._dynamo import config  # slow to import

    known: Any = getattr(config, "nontraceable_tensor_subclasses", None)  # since torch 2.7
    if known is not None:
        known.add(kind)


_Function = TypeVar("_Function", bound=Callable[..., Any])


def constant_when_compiled(function: _Function) -> _Function:
    """Has torch.compile call this function where it meets a call of it, and take the result for a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch's own function imports the compiler
    return function
