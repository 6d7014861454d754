"""Sufficient factors of a Linear layer's weight gradient, and how they are captured.

The gradient of a weight W (M×N) of a Linear layer is leftᵀ·right with K rows of output gradients
(left, K×M) and inputs (right, K×N) (Poseidon §3.2). If the layer exchanges factors, backward hands over the
two and does not compute the product.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from poseidon.torch.model.compiled import compiled_forward
from poseidon.torch.model.cut_linear import cut_linear
from poseidon.torch.model.linear_calls import TORCHS_LINEAR, FactorTaker, cast, compute, fits, is_plain
from poseidon.torch.tensors.pending_gradient import PendingGradient
from poseidon.torch.tensors.shard import Shard
from poseidon.torch.tensors.watched import touch

_TORCHS_FORWARD = nn.Linear.forward


class Factors:
    """Pairs of left (K_i×M) and right (K_i×N) rows. Pairs may differ in dtype (autocast)."""

    def __init__(self) -> None:
        self.lefts: list[torch.Tensor] = []
        self.rights: list[torch.Tensor] = []
        self.count = 0  # K, the sum of the K_i

    def append(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Adds one pair of contiguous matrices, which must not change afterwards."""
        self.lefts.append(left)
        self.rights.append(right)
        self.count += left.shape[0]

    def copy(self) -> Factors:
        """The same pairs in lists of their own."""
        other = Factors()
        other.lefts, other.rights, other.count = list(self.lefts), list(self.rights), self.count
        return other

    def scaled(self, scale: float) -> Factors:
        """Copies that stand for so many times the gradient."""
        other = self.copy()
        other.lefts = [left * scale for left in other.lefts]
        return other

    def __bool__(self) -> bool:
        return bool(self.lefts)

    def add_to(self, grad: torch.Tensor) -> None:
        """Adds the gradient that the factors stand for to `grad` (M×N)."""
        for left, right in zip(self.lefts, self.rights, strict=True):
            if left.dtype == right.dtype == grad.dtype:
                grad.addmm_(left.t(), right)
            else:
                grad.add_(left.to(grad.dtype).t() @ right.to(grad.dtype))

    def pending_gradient(self, param: torch.Tensor) -> PendingGradient:
        """A gradient of `param` that is made of these factors when someone looks at it."""
        reference, layout = weakref.ref(param), param.detach()

        def resolve(pending: PendingGradient) -> torch.Tensor:
            value = torch.zeros_like(layout)
            with torch.no_grad():
                self.add_to(value)
            param = reference()
            if param is not None and param.grad is pending:
                param.grad = value
            return value

        return PendingGradient.make(param, resolve)


NO_FACTORS = Factors()
"""None, to which nobody adds any."""


class _FactorLinear(torch.autograd.Function):
    """F.linear whose weight gradient may be handed over as factors. `input` has the compute dtype."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, entry: FactorTaker
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)  # no gradient is not one of zeros
        ctx.entry = entry
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.weight_shape, ctx.weight_dtype = weight.shape, weight.dtype
        # As torch does, which lets a program change a weight in place that backward does not need.
        ctx.save_for_backward(input, weight if ctx.needs_input_grad[0] else None)
        return compute(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if grad_output is None:
            return None, None, None, None
        input, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        left = grad_output.reshape(-1, ctx.weight_shape[0])
        grad_input = grad_weight = grad_bias = None
        if needs_input:
            grad_input = (left @ weight.to(left.dtype)).reshape(input.shape)
        if needs_bias:
            grad_bias = left.sum(0).to(ctx.bias_dtype)
        if needs_weight:
            right = input.reshape(-1, ctx.weight_shape[1])
            if not ctx.entry.take_factors(left, right):
                grad_weight = (left.t() @ right).to(ctx.weight_dtype)
        return grad_input, grad_weight, grad_bias, None


# Modules that hand over factors, by id, and who gets them. Nothing of this is in the module itself: it is copied, saved
# and scripted as torch's.
_Takers = dict[int, tuple["weakref.ref[nn.Linear]", "weakref.ref[FactorTaker]"]]
_TAKERS: _Takers = {}


def hand_over_factors(module: nn.Linear, taker: FactorTaker) -> None:
    """From now on the module's weight gradient may be handed over to `taker`, and to nobody else.

    Where somebody has replaced nn.Linear's forward since, nothing is handed over.
    """
    if nn.Linear.forward is _TORCHS_FORWARD:
        nn.Linear.forward = _Linear.forward  # type: ignore[method-assign, assignment]
    forget = partial(_forget, _TAKERS, id(module))
    _TAKERS[id(module)] = weakref.ref(module, forget), weakref.ref(taker)


def _forget(takers: _Takers, key: int, _: Any) -> None:
    takers.pop(key, None)


def keep_factors(module: nn.Linear, taker: FactorTaker) -> None:
    """Ends `hand_over_factors`, unless the module's factors go to another one by now."""
    if _taker_of(module) is taker:
        del _TAKERS[id(module)]


def _taker_of(module: nn.Linear) -> FactorTaker | None:
    known = _TAKERS.get(id(module))
    return known[1]() if known is not None and known[0]() is module else None


def computes_plainly(module: nn.Linear) -> bool:
    """Whether the module computes what torch's nn.Linear does, in a forward that can hand over factors."""
    # A function of torch's own file: another library may have replaced it before this one was imported.
    is_torchs = _TORCHS_FORWARD.__globals__ is vars(nn.modules.linear)
    return is_torchs and type(module).forward in (_TORCHS_FORWARD, _Linear.forward) and "forward" not in vars(module)


class _Linear(nn.Linear):
    """Has the forward that nn.Linear gets as soon as a module hands over factors."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Runs the forward pass."""
        # torch.jit.script compiles this source for every nn.Linear, and skips what follows `else`.
        if torch.jit.is_scripting():
            return F.linear(input, self.weight, self.bias)
        else:  # noqa: RET505
            return _forward(self, input)


# By these it is pickled, and loaded where there is no Poseidon.
_Linear.forward.__module__ = _TORCHS_FORWARD.__module__
_Linear.forward.__qualname__ = _TORCHS_FORWARD.__qualname__


def _forward(module: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return compiled_forward(module, input)
    if (taker := _taker_of(module)) is None:
        return F.linear(input, module.weight, module.bias)
    weight, bias = module.weight, module.bias
    touch((weight, bias))  # the Function below would do so where updates are no longer in place
    if isinstance(taker.param, Shard):
        if weight is taker.param.whole and _is_plain_call(taker, weight, bias):
            return cut_linear(taker, input, weight, bias)
        return F.linear(input, weight, bias)
    if not _capturable(taker, input, weight, bias):
        return F.linear(input, weight, bias)
    input = cast(input)
    if taker.armed:
        taker.count_forward_rows(input.numel() // weight.shape[1])
    return _FactorLinear.apply(input, weight, bias, taker)


def _capturable(entry: FactorTaker, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether this call can hand over factors; F.linear itself handles, or refuses, all other calls.

    The answer must not depend on when the call is made: a checkpoint makes it again, and compares what both save.
    """
    return weight is entry.param and _is_plain_call(entry, weight, bias) and fits(input, weight, bias)


def _is_plain_call(entry: FactorTaker, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether autograd records this call, and nothing else does or changes it."""
    if not weight.requires_grad or not torch.is_grad_enabled():
        return False
    if torch._C._get_tracing_state() is not None or _passes_others(entry, weight, bias):
        return False
    return not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0


def _passes_others(entry: FactorTaker, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether this call's linear function may be something else than torch's own, or was in the call it repeats."""
    intercepted = _intercepted(weight, bias)
    if torch._C._current_graph_task_id() >= 0:  # a checkpoint's, around which no mode of the forward pass is active
        return intercepted or entry.intercepted
    entry.intercepted = intercepted
    return intercepted


def _intercepted(weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether F.linear may be something else here than torch's own, whose gradient is known.

    Modes and tensors with a `__torch_dispatch__` may be there: what they do is below autograd, and changes no gradient
    in torch either.
    """
    if F.linear is not TORCHS_LINEAR:
        return True
    modes = (torch._C._get_function_stack_at(place) for place in range(torch._C._len_torch_function_stack()))
    if any(type(mode) is not DeviceContext for mode in modes):  # which only places new tensors
        return True
    return not is_plain(weight) or not (bias is None or is_plain(bias))
