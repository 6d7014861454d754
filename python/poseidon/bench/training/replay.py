"""A network whose layers sleep instead of computing, while parameters, gradients and their exchange are real.

What is real: every parameter and every gradient tensor, the forward product and (where the exchange needs the dense
gradient) the weight-gradient product of each `nn.Linear`, and everything that hooks on parameters or modules do.
What is slept: each layer's duration, spread over the layers by FLOPs. The Linear products take processor time that
an accelerator would not; they are part of every run alike, also of the one without exchange. A fully connected layer
whose factors are larger than its gradient, as in a transformer, is replayed without its products, since no scheme
would use its factors. Embeddings have dense gradients.

The timeline is that of an accelerator. Layers run one after the other, none shorter than its duration. Work of the
processor between two layers does not delay them, because an accelerator's queue is filled ahead; but a forward pass
that blocks (for parameters that have not arrived) delays all that follows by the whole time it was blocked.

An update is the accelerator's work, wherever it happens. Between backward and the next forward it takes the time that
it takes, as a pass begins when it begins. Within a pass, where hooks update a layer before it runs, its processor time
is charged to the accelerator (`ReplaySGD`). What it takes longer than that, because other hosts of this machine update
at the same time, counts as blocked: so nothing is counted twice, and each way of updating pays the same.

Products of received factors are the accelerator's work, too (`products.py`): its next layer, or the end of the backward
pass, comes later by what they take. Casts for the wire and products of servers are work of the processor in reality.
Here they take the processor's time.

Gradients are drawn anew for each layer, rank and step, with the exponents of real ones (`poseidon.gradients`). A layer
copies its own out of a stock of numbers while it sleeps, so that drawing costs no time. Parameters begin as a network's
initialization makes them, so that a step changes as much of their bits as in reality.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from poseidon.bench.training.products import Product
from poseidon.gradients.layers import LayerGradients
from poseidon.models import LayerSpec, ModelTable


class Timeline:
    """The accelerator's clock: when the layer that was launched last ends. One thread at a time."""

    def __init__(self) -> None:
        self.products: Callable[[], list[Product]] = list
        """Gives the products of exchanges that have ended since the last call."""
        self._end = 0.0
        self._charged = 0.0
        self._arrived = 0.0
        self._arrived_cpu = 0.0

    def begin(self) -> None:
        """Begins a pass now, with nothing queued."""
        self._end = time.monotonic()
        self._charged = 0.0  # what was done between passes has delayed this moment

    def charge(self, seconds: float) -> None:
        """The accelerator works for `seconds` before its next layer, on what the processor does here in its place."""
        self._charged += seconds

    def arrive(self) -> None:
        """The next layer of a forward pass is about to be called; its hooks may block."""
        self._arrived = time.monotonic()
        self._arrived_cpu = time.thread_time()

    def run_after_arrival(self, seconds: float) -> None:
        """Runs a layer for `seconds`, later by the time this thread was blocked since `arrive`."""
        waited = time.monotonic() - self._arrived
        computed = time.thread_time() - self._arrived_cpu
        self._end += max(0.0, waited - computed)
        self.run(seconds)

    def run(self, seconds: float) -> None:
        """Runs a layer for `seconds` behind the one before it; returns when it has ended."""
        self._charged += sum(product.seconds for product in self.products())
        self._end += self._charged + seconds
        self._charged = 0.0
        self._sleep()

    def multiply(self) -> None:
        """Makes the products that are left when backward and all exchanges have ended; returns when they are made."""
        for product in self.products():
            self._end = max(self._end, product.arrived) + product.seconds
        self._sleep()

    def _sleep(self) -> None:
        remaining = self._end - time.monotonic()
        if remaining > 0:
            time.sleep(remaining)  # releases the GIL


class ReplaySGD(torch.optim.SGD):
    """SGD that charges its processor time to the accelerator of `timeline`, also where it updates few parameters."""

    def __init__(self, params: Iterable[nn.Parameter], timeline: Timeline, **options: Any) -> None:
        super().__init__(params, **options)
        self._timeline = timeline

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        before = time.thread_time()
        loss = super().step(closure)
        self._timeline.charge(time.thread_time() - before)
        return loss


Gradients = tuple[torch.Tensor | None, ...]


class _Token(torch.autograd.Function):
    """Maps the token that orders the layers to itself. Its backward pass calls `work`, which gives the gradients of
    `tensors`."""

    @staticmethod
    def forward(
        ctx: Any, token: torch.Tensor, work: Callable[[], Gradients], *tensors: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.work = work
        return token.view_as(token)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Gradients:
        return gradients[0], None, *ctx.work()


def _as_torch(numbers: NDArray[np.float32], dtype: torch.dtype) -> torch.Tensor:
    """In torch's own memory, as what autograd makes: the owner of other memory could look at it at any time."""
    return torch.from_numpy(numbers).to(dtype, copy=True)


class ReplayDense(nn.Module):
    """A layer whose gradients are dense: maps the one-element token that orders the layers to itself.

    `shared` is the weight of another layer, which this one uses, too. Numbers are of `dtype`.
    """

    def __init__(
        self,
        spec: LayerSpec,
        timeline: Timeline,
        seconds: tuple[float, float],
        gradients: LayerGradients,
        dtype: torch.dtype,
        shared: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.timeline = timeline
        self._spec, self._gradients, self._dtype = spec, gradients, dtype
        self.forward_seconds, self.backward_seconds = seconds
        self.weight = nn.Parameter(torch.empty(spec.weight_shape, dtype=dtype)) if shared is None else shared
        self.bias = nn.Parameter(torch.empty(spec.bias_count, dtype=dtype)) if spec.bias else None

    def forward(self, token: torch.Tensor) -> torch.Tensor:
        for parameter in self.parameters():
            parameter.detach()  # a layer that computes reads its parameters here, and waits until they have arrived
        self.timeline.run_after_arrival(self.forward_seconds)
        return _Token.apply(token, self._run_backward, self.weight, self.bias)

    def _run_backward(self) -> Gradients:
        """Draws its gradients while it sleeps."""
        drawn = self.drawn()
        self.timeline.run(self.backward_seconds)
        return drawn[self.weight], None if self.bias is None else drawn[self.bias]

    def drawn(self) -> dict[torch.Tensor, torch.Tensor]:
        """New gradients."""
        found: dict[torch.Tensor, torch.Tensor] = {
            self.weight: _as_torch(self._gradients.weight(self._spec), self._dtype)
        }
        if self.bias is not None:
            found[self.bias] = _as_torch(self._gradients.bias(self._spec), self._dtype)
        return found


class ReplayLinear(nn.Module):
    """An fc layer: a plain `nn.Linear` on K rows, of which K rows of output gradients come back."""

    def __init__(
        self,
        spec: LayerSpec,
        timeline: Timeline,
        seconds: tuple[float, float],
        gradients: LayerGradients,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.timeline = timeline
        self.forward_seconds, self.backward_seconds = seconds
        rows, cols = spec.weight_shape
        self.linear = nn.Linear(cols, rows, bias=spec.bias, device="meta", dtype=dtype)
        self.linear.to_empty(device="cpu")
        # Plain attributes, not buffers: what a wrapper would broadcast must be empty.
        self.input_rows, self.output_gradient = (_as_torch(one, dtype) for one in gradients.factors(spec))
        self.row_seconds = self.forward_seconds / len(self.input_rows)
        self._random = np.random.default_rng(len(self.input_rows))

    def forward(self, token: torch.Tensor) -> torch.Tensor:
        output = self.linear(self.input_rows)
        self.timeline.run_after_arrival(self.forward_seconds)
        return _Token.apply(token, self._run_backward, output)

    def _run_backward(self) -> Gradients:
        """Sleeps before the backward pass of its product."""
        self._draw()
        self.timeline.run(self.backward_seconds)
        return (self.output_gradient,)

    def _draw(self) -> None:
        """Gives rows of output gradients other signs, so that the product is another one."""
        signs = self._random.integers(2, size=(len(self.output_gradient), 1)) * 2 - 1
        self.output_gradient = self.output_gradient * torch.from_numpy(signs).to(self.output_gradient.dtype)

    def drawn(self) -> dict[torch.Tensor, torch.Tensor]:
        """New gradients, as those of the product in a backward pass."""
        self._draw()
        found: dict[torch.Tensor, torch.Tensor] = {self.linear.weight: self.output_gradient.T @ self.input_rows}
        if self.linear.bias is not None:
            found[self.linear.bias] = self.output_gradient.sum(0)
        return found


class ReplayModel(nn.Module):
    """A table's layers in order. `model(token)` returns a scalar whose `backward()` runs them in reverse.

    One iteration without exchange takes `compute_seconds`. `rank` makes gradients, and the rows of fully connected
    layers, differ between workers. `memory` is another model of the same table, whose parameters' memory this one
    takes, so that several wrapped copies fit a small machine. Only the one that has it may train. They draw from one
    stock of gradients. `beside` is another one whose stock it uses, but not its memory. `unscaled` is the table of
    which `table` is a scaled one: embeddings have as many zeros as its. Parameters and gradients are of `dtype`.
    """

    def __init__(
        self,
        table: ModelTable,
        compute_seconds: float,
        *,
        rank: int = 0,
        memory: ReplayModel | None = None,
        beside: ReplayModel | None = None,
        unscaled: ModelTable | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.timeline = Timeline()
        self.layers = nn.ModuleDict()
        other = memory or beside
        self.gradients: LayerGradients = LayerGradients(table, rank, unscaled) if other is None else other.gradients
        for spec, seconds in zip(table.layers, table.durations(compute_seconds), strict=True):
            layer: nn.Module
            if table.factors_pay(spec):
                layer = ReplayLinear(spec, self.timeline, seconds, self.gradients, dtype)
            else:
                shared = self.layers[_module_name(spec.shares)].get_parameter("weight") if spec.shares else None
                layer = ReplayDense(spec, self.timeline, seconds, self.gradients, dtype, shared)
            self.layers[_module_name(spec.name)] = layer
        if memory is None:
            self._initialize(table)
        else:
            self.take_memory(memory)

    def drawn(self) -> dict[torch.Tensor, torch.Tensor]:
        """New gradients of all parameters, as a backward pass draws them, but at once."""
        found: dict[torch.Tensor, torch.Tensor] = {}
        for layer in reversed(list(self.layers.values())):
            assert isinstance(layer, ReplayDense | ReplayLinear)
            for parameter, gradient in layer.drawn().items():
                found[parameter] = found[parameter] + gradient if parameter in found else gradient
        return found

    def _initialize(self, table: ModelTable) -> None:
        for spec in table.layers:
            for name, parameter in self.layers[_module_name(spec.name)].named_parameters():
                if name.endswith("bias"):
                    nn.init.zeros_(parameter)
                elif not spec.shares:
                    parameter.data.copy_(torch.from_numpy(self.gradients.initial_weight(spec)))

    def take_memory(self, other: ReplayModel) -> None:
        """Takes the memory of another model's parameters, and the values in it. The other keeps none."""
        # Not shared: an optimizer that updates a parameter when it is used can do so only where all uses are its own.
        for mine, its in zip(self.parameters(), other.parameters(), strict=True):
            mine.data = its.data
            its.data = its.data.new_zeros(()).expand(its.shape)

    def forward(self, token: torch.Tensor) -> torch.Tensor:
        self.timeline.begin()
        for layer in self.layers.values():
            self.timeline.arrive()
            token = layer(token)
        return _Token.apply(token, self._begin_backward).sum()

    def _begin_backward(self) -> Gradients:
        self.timeline.begin()
        return ()

    def linear_weights(self) -> dict[str, ReplayLinear]:
        """The layers whose weights can go as factors, by the weight's name, in forward order."""
        return {
            f"layers.{name}.linear.weight": layer
            for name, layer in self.layers.items()
            if isinstance(layer, ReplayLinear)
        }


def _module_name(layer: str) -> str:
    return layer.replace(".", "_")  # a module's name has no dot


def input_token() -> torch.Tensor:
    """Returns the argument that a ReplayModel is called with."""
    return torch.zeros(1)
