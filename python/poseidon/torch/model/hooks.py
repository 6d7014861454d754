"""The hooks that autograd calls for parameters. In a model of many small ones their time is most of what a step costs.

They keep no parameter alive: the node that holds a hook is held by what hears of it. Where a whole training step is
compiled they are not. To say so on every call takes 0.4 µs, to look 0.04.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, Protocol

import torch

from poseidon.torch.tensors.compatibility import compiler, leave_uncompiled

_graph_task: Callable[[], int] = torch._C._current_graph_task_id
_now_ns = time.monotonic_ns


class Arrivals:
    """What the hooks of parameters that travel together count in a backward pass. All but the last do no more."""

    __slots__ = ("awaited", "ready_ns", "task")

    def __init__(self) -> None:
        self.awaited: set[Any] = set()  # the parameters whose gradients have yet to arrive
        self.ready_ns: dict[Any, int] = {}  # when each of the others has arrived, by the monotonic clock
        self.task: int | None = None  # autograd's number of the pass in which hooks only count; None: in no pass


NO_ARRIVALS = Arrivals()
"""Those of a parameter that travels alone."""


class Reached(Protocol):
    """Something whose gradient autograd accumulates."""

    arrivals: Arrivals

    def before_accumulation(self, gradients: Any) -> None:
        """Autograd is about to add these, one or None, to `.grad`."""

    def after_accumulation(self, gradients: Any) -> None:
        """It has done so."""


class _All(torch.autograd.Function):
    """Its node comes after those that accumulate the gradients of its inputs."""

    @staticmethod
    def forward(ctx: Any, *params: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)


def accumulating_nodes(params: Sequence[torch.Tensor]) -> list[Any]:
    """The nodes that accumulate the gradients of these leaves. A node lives only as long as someone holds it.

    Its hooks fire also for a missing gradient, once all uses of the leaf have contributed.
    """
    with torch.enable_grad():
        together: Any = _All.apply(*params)  # type: ignore[no-untyped-call]
    return [node for node, _ in together.grad_fn.next_functions]


def prehook(target: Reached) -> Callable[[Any], None]:
    """A prehook that calls `before_accumulation`."""
    reference = weakref.ref(target)

    def hook(arrived: Any) -> None:
        here = reference()
        if here is None:
            return
        if compiler is None or compiler() is not None:
            _uncompiled(here.before_accumulation, arrived)
        else:
            here.before_accumulation(arrived)

    _leave_uncompiled(hook.__code__)
    return hook


def posthook(target: Reached) -> Callable[[Any, Any], None]:
    """A hook that calls `after_accumulation`, unless it only has to count."""
    reference = weakref.ref(target)

    def hook(_: Any, arrived: Any) -> None:
        here = reference()
        if here is None:
            return
        if compiler is None or compiler() is not None:
            _uncompiled(here.after_accumulation, arrived)
            return
        arrivals = here.arrivals
        awaited = arrivals.awaited
        if here in awaited and len(awaited) > 1 and _graph_task() == arrivals.task:
            awaited.remove(here)
            arrivals.ready_ns[here] = _now_ns()
        else:
            here.after_accumulation(arrived)

    _leave_uncompiled(hook.__code__)
    return hook


def while_alive(method: Callable[..., Any]) -> Callable[..., Any]:
    """Calls the method, as long as its object lives; then it returns None.

    There is to be no cycle through the objects of a model: without its wrapper a module is at once plain.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **named: Any) -> Any:
        return None if (found := reference()) is None else found(*args, **named)

    return call


def in_turn(first: Callable[..., None], second: Callable[..., None]) -> Callable[..., None]:
    """One hook that is both of these."""

    def both(*arguments: Any) -> None:
        first(*arguments)
        second(*arguments)

    return both


def has_others(handle: Any) -> bool:
    """Whether somebody else has registered a hook of the same kind, from Python, at the node of this handle.

    `handle` is what the node has returned for a `prehook` or a `posthook`.
    """
    hooks = handle.hooks_dict_ref()  # a node has one table for each kind
    return len(hooks) > 1 and any(getattr(hook, "__module__", None) != __name__ for hook in list(hooks.values()))


@torch._disable_dynamo
def _uncompiled(hear: Callable[[Any], None], arrived: Any) -> None:
    hear(arrived)


@functools.cache
def _leave_uncompiled(code: CodeType) -> None:  # which all hooks of one kind share
    leave_uncompiled(code)
