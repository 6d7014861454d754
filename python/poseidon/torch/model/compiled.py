"""Factors out of code that `torch.compile` has made.

A compiled backward pass returns the gradient of each weight as a tensor, or never: which of both was decided when it
was compiled. Whether the gradient is handed over as factors is decided in each step. So it leaves on another way.

Compiled code calls the operator `poseidon::linear`, which has no gradient of the weight. In backward it calls
`poseidon::hand_over` with the rows, which does what backward does in eager mode. What was not taken becomes the dense
gradient and waits for the weight's *gate*. This is a tensor of one element, made of the weight outside of all compiled
code, and an input of `poseidon::linear`. After the compiled backward passes in which the weight was used, autograd runs
the gate's own, which is not compiled. It returns the gradient that waits, or none.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

from poseidon.errors import PoseidonError
from poseidon.torch.model.linear_calls import TORCHS_LINEAR, FactorTaker, cast, compute, fits, is_plain
from poseidon.torch.tensors.compatibility import constant_when_compiled

_GATE = "_factor_gate"  # an attribute of weights
_MOST_PASSES = 8
# Times the size of the dense gradient: of more no batch is going to pay, and the compiler does better.
_MOST_FACTORS = 8
_CAN_HAND_OVER = hasattr(torch.compiler, "is_exporting")  # since torch 2.7: what is exported must not have the operator
_uses = itertools.count()
_numbers = itertools.count()


@dataclass
class _Handed:
    """What one backward pass has handed over of a weight's gradient."""

    count: int = 0  # of uses of the weight
    dense: torch.Tensor | None = None  # the sum of those that were not taken as factors


class _Waiting:
    """What compiled backward passes have handed over and the weight's gate has yet to see."""

    def __init__(self, taker: FactorTaker) -> None:
        self.number = next(_numbers)
        self.name = getattr(taker, "name", "")
        self._dtype = taker.param.dtype
        param = weakref.ref(taker.param)
        # Autograd keeps the weight for its gate, and the weight has the gate: neither would ever be freed.
        self._taker = weakref.ref(taker, lambda _: self._drop_gate(param()))
        self._passes: OrderedDict[int, _Handed] = OrderedDict()  # by autograd's number of the backward pass
        self._memory: Any = None

    def _drop_gate(self, param: torch.Tensor | None) -> None:
        gate = None if param is None else vars(param).get(_GATE)
        if isinstance(gate, Gate) and gate.waiting is self:
            delattr(param, _GATE)

    @property
    def taker(self) -> FactorTaker | None:
        """Who takes factors, if it still lives."""
        return self._taker()

    def lies_in(self, gate: torch.Tensor) -> None:
        """Notes the gate's memory, by whose address compiled code finds this object without reading it."""
        self._memory = gate.untyped_storage()
        _BY_ADDRESS[gate.data_ptr()] = _BY_NUMBER[self.number] = self

    def hand_over(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Gives the rows of one use to the taker. If that does not want them their product waits."""
        task = torch._C._current_graph_task_id()
        handed = self._passes.setdefault(task, _Handed())
        while len(self._passes) > _MOST_PASSES:  # the oldest has failed, or did not want the weight's gradient
            self._passes.popitem(last=False)
        handed.count += 1
        taker = self.taker
        if taker is not None and taker.take_factors(left, right):
            return
        dense = (left.t() @ right).to(self._dtype)
        handed.dense = dense if handed.dense is None else handed.dense + dense

    def take(self, uses: torch.Tensor) -> torch.Tensor | None:
        """The dense gradient of the backward pass that runs now, if there is one.

        `uses`: how often compiled code has handed over rows, as it counts. Raises PoseidonError where rows were lost.
        """
        handed = self._passes.pop(torch._C._current_graph_task_id(), None) or _Handed()
        text = (
            f"compiled code has used parameter {self.name} without handing over all of its gradient, as a CUDA graph "
            "does that is played again: leave mode='reduce-overhead' out of torch.compile, or pass scheme='ps' for it"
        )
        if uses.device.type != "cpu":
            torch._assert_async(uses == handed.count, text)  # reading it here would wait for the device
        elif uses.item() != handed.count:
            raise PoseidonError(text)
        return handed.dense


# The objects by the memory of their gates, and by what is written there: saved tensors may be copied (`save_on_cpu`).
_BY_ADDRESS: weakref.WeakValueDictionary[int, _Waiting] = weakref.WeakValueDictionary()
_BY_NUMBER: weakref.WeakValueDictionary[int, _Waiting] = weakref.WeakValueDictionary()


def _waiting_for(gate: torch.Tensor) -> _Waiting:
    found = _BY_ADDRESS.get(gate.data_ptr())
    return _BY_NUMBER[int(gate.item())] if found is None else found


class _FromWeight(torch.autograd.Function):
    """Makes a weight's gate."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, waiting: _Waiting) -> torch.Tensor:
        ctx.waiting = waiting
        ctx.set_materialize_grads(False)
        gate = torch.full((1,), float(waiting.number), dtype=torch.float32, device=weight.device)
        waiting.lies_in(gate)
        return gate

    @staticmethod
    def backward(ctx: Any, uses: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return (None if uses is None else _take(ctx.waiting, uses)), None


@torch._disable_dynamo  # what waits now must not be compiled, by compiled autograd, as what waits always
def _take(waiting: _Waiting, uses: torch.Tensor) -> torch.Tensor | None:
    dense = waiting.take(uses)
    if dense is None or not torch.is_grad_enabled():
        return dense
    text = b"the gradient of a weight of compiled code cannot be differentiated: leave that code uncompiled"
    return torch._C._functions.DelayedError(text, 1)(dense.requires_grad_())  # type: ignore[no-any-return]


class Gate:
    """What a weight has as an attribute while compiled code may hand over factors of its gradient."""

    def __init__(self, taker: FactorTaker) -> None:
        self.waiting = _Waiting(taker)
        with torch.enable_grad():
            self.tensor: torch.Tensor = _FromWeight.apply(taker.param, self.waiting)  # type: ignore[no-untyped-call]

    def __reduce__(self) -> Any:
        return OrderedDict, ()  # saved with a weight it stands for nothing, and is loaded without Poseidon


def is_in_use() -> bool:
    """Whether torch.compile was used in this process, so that gates are of use."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return _CAN_HAND_OVER and bool(getattr(frames, "cached_backends", None))


def open_gate(taker: FactorTaker) -> None:
    """From now on compiled code may hand over the weight's gradient to `taker`."""
    if not _is_open(taker):
        setattr(taker.param, _GATE, Gate(taker))


def close_gate(taker: FactorTaker) -> None:
    """Ends `open_gate`, unless the weight's gradient goes to another one by now."""
    if _is_open(taker):
        delattr(taker.param, _GATE)


def _is_open(taker: FactorTaker) -> bool:
    gate = vars(taker.param).get(_GATE)
    return isinstance(gate, Gate) and gate.waiting.taker is taker


# What torch.compile looks at.


def compiled_forward(module: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """The forward of a Linear module in compiled code."""
    weight, bias = module.weight, module.bias
    gate = getattr(weight, _GATE, None)
    if not isinstance(gate, Gate) or not _hands_over(input, weight, bias):
        return F.linear(input, weight, bias)
    linear: Any = torch.ops.poseidon.linear
    return linear(cast(input), weight, bias, gate.tensor, _next_use())  # type: ignore[no-any-return]


def _hands_over(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether this call can, and may, hand over factors. If not it is compiled as without Poseidon."""
    if torch.compiler.is_exporting() or not torch.is_grad_enabled() or not weight.requires_grad:
        return False
    if F.linear is not TORCHS_LINEAR or torch._C._len_torch_function_stack() > 0 or _is_transformed():
        return False
    if type(weight) is not nn.Parameter or not (bias is None or is_plain(bias)) or not fits(input, weight, bias):
        return False
    rows, cols = weight.shape
    return input.numel() // cols * (rows + cols) <= _MOST_FACTORS * rows * cols


@constant_when_compiled
def _is_transformed() -> bool:
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


@constant_when_compiled
def _next_use() -> int:
    """Another number for each place of compiled code: of two equal calls a compiler makes one."""
    return next(_uses)


# The operators.


def _linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gate: torch.Tensor, use: int
) -> torch.Tensor:
    taker = _waiting_for(gate).taker
    if taker is not None and taker.armed:
        taker.count_forward_rows(input.numel() // weight.shape[1])
    return compute(input, weight, bias).contiguous()


def _hand_over(left: torch.Tensor, right: torch.Tensor, gate: torch.Tensor, use: int) -> torch.Tensor:
    _waiting_for(gate).hand_over(left, right)
    return torch.ones_like(gate)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    input, weight, bias, gate, ctx.use = inputs
    ctx.weight_shape, ctx.bias_dtype = weight.shape, None if bias is None else bias.dtype
    ctx.save_for_backward(input, weight if ctx.needs_input_grad[0] else None, gate)


def _backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    input, weight, gate = ctx.saved_tensors
    needs_input, _, needs_bias, needs_gate, _ = ctx.needs_input_grad
    rows, cols = ctx.weight_shape
    left = grad_output.reshape(-1, rows)
    grad_input = (left @ weight.to(left.dtype)).reshape(input.shape) if needs_input else None
    grad_bias = left.sum(0).to(ctx.bias_dtype) if needs_bias else None
    uses = torch.ops.poseidon.hand_over(left, input.reshape(-1, cols), gate, ctx.use) if needs_gate else None
    return grad_input, None, grad_bias, uses, None


def _define() -> torch.library.Library:
    library = torch.library.Library("poseidon", "DEF")
    library.define("linear(Tensor input, Tensor weight, Tensor? bias, Tensor gate, int use) -> Tensor")
    library.define("hand_over(Tensor left, Tensor right, Tensor gate, int use) -> Tensor")
    library.impl("linear", _linear, "CompositeExplicitAutograd")
    library.impl("hand_over", _hand_over, "CompositeExplicitAutograd")
    torch.library.register_fake("poseidon::linear", _fake_linear, lib=library)
    torch.library.register_fake("poseidon::hand_over", _fake_hand_over, lib=library)
    torch.library.register_autograd("poseidon::linear", _backward, setup_context=_save, lib=library)
    return library


def _fake_linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gate: torch.Tensor, use: int
) -> torch.Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


def _fake_hand_over(left: torch.Tensor, right: torch.Tensor, gate: torch.Tensor, use: int) -> torch.Tensor:
    return torch.empty_like(gate)


_LIBRARY = _define()
"""The operators, for as long as the process runs."""
