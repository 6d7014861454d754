"""Layer tables: the parameters of each layer of a network, and how long the layer computes.

A replayed benchmark, a planner or a simulator needs nothing else from a network. Nothing here imports a framework.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, floor, prod
from typing import Literal

import numpy as np

Kind = Literal["conv", "fc", "norm", "embedding", "plain"]
Shape = tuple[int, int, int]  # channels, height, width of one image's activation

_FLOAT32_BYTES = 4
FORWARD_SHARE = 1 / 3  # of an iteration's compute; backward forms two products per layer where forward forms one


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter as it was seen in a real model.

    name: as training calls it. count: the elements that are exchanged for its gradient, which
    have size_bytes together, each of dtype. factorable: its gradient may travel as factors; fully_connected:
    only fully connected modules have it; rows: "touched" if its gradient is an embedding's, "sparse" if it is a sparse
    one, else empty. factor_count: K of one worker and step, or the rows of its gradient; 0: it goes whole. presence:
    the part of the steps in which it got a gradient. place: in the order in which modules registered their parameters.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    size_bytes: int
    factorable: bool
    fully_connected: bool
    rows: Literal["", "touched", "sparse"] = ""
    factor_count: int = 0
    presence: float = 1.0
    place: int = 0


@dataclass(frozen=True)
class LayerSpec:
    """One parameterized layer.

    weight_shape: (out, in / groups, kernel height, kernel width) of a conv, (rows, cols) = (out, in) of an fc,
    (channels,) of a norm, (rows, width) of an embedding, any of a plain parameter, which is only added.
    flops: of the forward pass for one sample, a multiply-add counted as two. They include those of the operations
    without parameters that follow the layer, up to the next one of the table.
    positions: how often the weight is applied to one sample, so that K = batch × positions for a factorable layer; of
    an embedding, how many rows one sample looks up.
    row_exponent: an embedding's rows are looked up by a Zipf law with this exponent; with 0 all are equally likely.
    shares: the earlier layer whose weight this one uses, as its own. Its gradient is complete when both have run
    backward. Empty for a layer with a weight of its own.
    is_parameter: the weight has the layer's own name, because the layer is no module but a single parameter.
    parameters: those that the layer owns, where they were seen; None: they follow from the shape.
    """

    name: str
    kind: Kind
    weight_shape: tuple[int, ...]
    bias: bool
    flops: float
    positions: int = 1
    row_exponent: float = 0.0
    shares: str = ""
    is_parameter: bool = False
    parameters: tuple[ParameterSpec, ...] | None = None

    @property
    def weight_count(self) -> int:
        """Elements of the weight; 0 if it is another layer's."""
        return 0 if self.shares else prod(self.weight_shape)

    @property
    def bias_count(self) -> int:
        """Elements of the bias; 0 without one."""
        return self.weight_shape[0] if self.bias else 0

    @property
    def parameter_count(self) -> int:
        """Elements of all that the layer owns."""
        return sum(self.tensors.values())

    @property
    def tensors(self) -> dict[str, int]:
        """The elements of each parameter that the layer owns, by its name in the layer."""
        if self.parameters is not None:
            return {one.name: one.count for one in self.parameters}
        counts = {"weight": self.weight_count, "bias": self.bias_count}
        return {name: count for name, count in counts.items() if count}

    @property
    def tensor_bytes(self) -> list[int]:
        """The bytes of the gradient of each."""
        if self.parameters is not None:
            return [one.size_bytes for one in self.parameters]
        return [count * _FLOAT32_BYTES for count in self.tensors.values()]

    @property
    def factorable(self) -> bool:
        """Whether the weight's gradient is a sum of K outer products, so that it can go as factors."""
        return self.kind == "fc" and not self.shares


@dataclass(frozen=True)
class ModelTable:
    """A network's layers in forward order.

    batch: samples per worker and iteration. iteration_seconds: of one iteration of `batch` samples on one device
    without exchange, from iteration_source; the unscaled value also on a scaled table. sample: what a sample is.
    forward_share: the forward pass's part of an iteration's compute. seconds: what each layer's forward and
    backward pass take, where that was measured; empty: in proportion to their FLOPs.
    """

    name: str
    layers: tuple[LayerSpec, ...]
    batch: int
    iteration_seconds: float
    iteration_source: str
    sample: str = "image"
    forward_share: float = FORWARD_SHARE
    seconds: tuple[tuple[float, float], ...] = ()

    @property
    def parameter_count(self) -> int:
        """Elements of all weights and biases."""
        return sum(layer.parameter_count for layer in self.layers)

    @property
    def flops(self) -> float:
        """The FLOPs of the forward pass for one sample."""
        return sum(layer.flops for layer in self.layers)

    def with_batch(self, batch: int | None) -> ModelTable:
        """The same network with `batch` samples per worker, which take time in proportion. None: this table."""
        if batch is None or batch == self.batch:
            return self
        return replace(
            self,
            batch=batch,
            iteration_seconds=self.iteration_seconds * batch / self.batch,
            iteration_source=f"{batch} samples of: {self.iteration_source}",
        )

    def factor_count(self, layer: LayerSpec) -> int:
        """K of a factorable layer on one worker; 0 for any other."""
        return self.batch * layer.positions if layer.factorable else 0

    def factors_pay(self, layer: LayerSpec) -> bool:
        """Whether one worker's K factors are at most as large as the dense gradient.

        Where they are larger, no scheme gains from them, however few workers there are.
        """
        if not layer.factorable:
            return False
        rows, cols = layer.weight_shape
        return self.factor_count(layer) * (rows + cols) <= rows * cols

    def rows_touched(self, layer: LayerSpec) -> float:
        """The rows of an embedding that one worker's iteration is expected to touch; all that a second layer uses."""
        rows = layer.weight_shape[0]
        if any(other.shares == layer.name for other in self.layers):
            return rows
        return distinct_rows(rows, self.batch * layer.positions, layer.row_exponent)

    def durations(self, compute_seconds: float) -> list[tuple[float, float]]:
        """Spreads `compute_seconds` over the layers: (forward, backward) seconds of each, in forward order."""
        if self.seconds:
            stretch = compute_seconds / sum(map(sum, self.seconds))
            return [(forward * stretch, backward * stretch) for forward, backward in self.seconds]
        total = self.flops
        return [
            (compute_seconds * self.forward_share * share, compute_seconds * (1 - self.forward_share) * share)
            for share in (layer.flops / total for layer in self.layers)
        ]


def scaled(model: ModelTable, divisor: int) -> ModelTable:
    """Divides both dimensions of every weight (channels of a conv, not its kernel) and the batch by `divisor`.

    No dimension falls below 1. The bytes of every scheme then fall by divisor², so their order is kept; FLOPs stay
    those of the whole network, because they only say how time is shared between layers.
    Raises ValueError if `divisor` is below 1.
    """
    if divisor < 1:
        raise ValueError(f"the scale of {model.name} must be at least 1, not {divisor}")

    def shrink(shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(max(1, extent // divisor) for extent in shape[:2]) + shape[2:]

    return replace(
        model,
        layers=tuple(replace(layer, weight_shape=shrink(layer.weight_shape)) for layer in model.layers),
        batch=max(1, model.batch // divisor),
    )


def distinct_rows(row_count: int, look_ups: int, exponent: float) -> float:
    """The expected number of distinct rows among `look_ups` rows that a Zipf law draws from `row_count`."""
    weights = np.arange(1, row_count + 1, dtype=np.float64) ** -exponent
    missed = (1 - weights / weights.sum()) ** look_ups
    return float(row_count - missed.sum())


def seconds_by_flops(
    layers: tuple[LayerSpec, ...], batch: int, reference: ModelTable, forward_share: float = FORWARD_SHARE
) -> float:
    """Seconds of one iteration of `batch` samples on the device that `reference` was timed on, by FLOPs at its rate.

    `forward_share` is the forward pass's part of the iteration.
    """
    samples = batch * sum(layer.flops for layer in layers) / reference.flops  # of the reference's
    return reference.iteration_seconds * samples / reference.batch * reference.forward_share / forward_share


def pooled(shape: Shape, kernel: int, stride: int, *, padding: int = 0, round_up: bool = False) -> Shape:
    """The shape after a pooling layer, which has no parameters. Caffe rounds the extent up, PyTorch down."""
    rounding: Callable[[float], int] = ceil if round_up else floor
    height, width = (rounding((extent + 2 * padding - kernel) / stride) + 1 for extent in shape[1:])
    return shape[0], height, width


class TableBuilder:
    """Collects layers in forward order. The methods for images take an activation's shape and return the next one's."""

    def __init__(self, *, norm: bool = False) -> None:
        """norm: each conv is followed by a batch norm and has no bias of its own."""
        self.layers: list[LayerSpec] = []
        self._norm = norm

    def conv(
        self,
        name: str,
        shape: Shape,
        channels: int,
        kernel: int | tuple[int, int],
        *,
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
        groups: int = 1,
    ) -> Shape:
        """A convolution, with its norm if the builder adds one."""
        kernels = (kernel, kernel) if isinstance(kernel, int) else kernel
        paddings = (padding, padding) if isinstance(padding, int) else padding
        height, width = (
            (extent + 2 * pad - size) // stride + 1
            for extent, pad, size in zip(shape[1:], paddings, kernels, strict=True)
        )
        weight_shape = (channels, shape[0] // groups, *kernels)
        flops = 2 * prod(weight_shape) * height * width
        self.layers.append(LayerSpec(name, "conv", weight_shape, not self._norm, flops, positions=height * width))
        if self._norm:
            # Scale and shift of every element.
            self.layers.append(LayerSpec(f"{name}.norm", "norm", (channels,), True, 2 * channels * height * width))
        return channels, height, width

    def fc(
        self, name: str, in_features: int, out_features: int, *, positions: int = 1, bias: bool = True, shares: str = ""
    ) -> int:
        """A fully connected layer on `positions` rows of a sample; returns its width."""
        shape = (out_features, in_features)
        flops = 2 * prod(shape) * positions
        self.layers.append(LayerSpec(name, "fc", shape, bias, flops, positions, shares=shares))
        return out_features

    def norm(self, name: str, width: int, positions: int, *, bias: bool = True) -> None:
        """A layer norm of `positions` rows of a sample: scale and, with `bias`, shift of every element."""
        self.layers.append(LayerSpec(name, "norm", (width,), bias, 2 * width * positions, positions))

    def embedding(self, name: str, rows: int, width: int, look_ups: int, row_exponent: float = 0.0) -> None:
        """A table of which one sample looks up and adds `look_ups` rows."""
        flops = width * look_ups
        self.layers.append(LayerSpec(name, "embedding", (rows, width), False, flops, look_ups, row_exponent))

    def plain(self, name: str, shape: tuple[int, ...]) -> None:
        """A parameter that is added to a sample's activation, such as a table of positions."""
        self.layers.append(LayerSpec(name, "plain", shape, False, prod(shape)))

    def work(self, flops: float) -> None:
        """Operations without parameters. They count to the layer before them.

        In forward they run after its product, and in backward before it: its weight is needed no later and its
        gradient complete no earlier than in the network.
        """
        self.layers[-1] = replace(self.layers[-1], flops=self.layers[-1].flops + flops)
