"""Layer tables: the parameters of each layer of a network, and how long the layer computes.

A replayed benchmark, a planner or a simulator needs nothing else from a network. Nothing here imports a framework.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, floor, prod
from typing import Literal

Kind = Literal["conv", "fc", "norm"]
Shape = tuple[int, int, int]  # channels, height, width of one image's activation

FORWARD_SHARE = 1 / 3  # of an iteration's compute; backward forms two products per layer where forward forms one


@dataclass(frozen=True)
class LayerSpec:
    """One parameterized layer.

    weight_shape: (out, in / groups, kernel height, kernel width) of a conv, (rows, cols) = (out, in) of an fc,
    (channels,) of a norm. flops: of the forward pass for one image, a multiply-add counted as two.
    positions: how often the weight is applied to one image, so that K = batch × positions for a factorable layer.
    """

    name: str
    kind: Kind
    weight_shape: tuple[int, ...]
    bias: bool
    flops: float
    positions: int = 1

    @property
    def weight_count(self) -> int:
        """Elements of the weight."""
        return prod(self.weight_shape)

    @property
    def bias_count(self) -> int:
        """Elements of the bias; 0 without one."""
        return self.weight_shape[0] if self.bias else 0

    @property
    def parameter_count(self) -> int:
        """Elements of weight and bias."""
        return self.weight_count + self.bias_count

    @property
    def factorable(self) -> bool:
        """Whether the weight's gradient is a sum of K outer products, so that it can go as factors."""
        return self.kind == "fc"


@dataclass(frozen=True)
class ModelTable:
    """A network's layers in forward order.

    batch: images per worker and iteration. iteration_seconds: of one iteration of `batch` images on one device without
    exchange, from iteration_source; the unscaled value also on a scaled table. scale: the divisor `scaled` applied.
    """

    name: str
    layers: tuple[LayerSpec, ...]
    batch: int
    iteration_seconds: float
    iteration_source: str
    scale: int = 1

    @property
    def parameter_count(self) -> int:
        """Elements of all weights and biases."""
        return sum(layer.parameter_count for layer in self.layers)

    @property
    def flops(self) -> float:
        """The FLOPs of the forward pass for one image."""
        return sum(layer.flops for layer in self.layers)

    def factor_count(self, layer: LayerSpec) -> int:
        """K of a factorable layer on one worker; 0 for any other."""
        return self.batch * layer.positions if layer.factorable else 0

    def durations(self, compute_seconds: float) -> list[tuple[float, float]]:
        """Spreads `compute_seconds` over the layers by FLOPs: (forward, backward) seconds of each, in forward order."""
        total = self.flops
        return [
            (compute_seconds * FORWARD_SHARE * share, compute_seconds * (1 - FORWARD_SHARE) * share)
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
        scale=model.scale * divisor,
    )


def seconds_by_flops(layers: tuple[LayerSpec, ...], batch: int, reference: ModelTable) -> float:
    """Seconds of one iteration of `batch` images on the device that `reference` was timed on, by FLOPs at its rate."""
    images = batch * sum(layer.flops for layer in layers) / reference.flops  # of the reference's
    return reference.iteration_seconds * images / reference.batch


def pooled(shape: Shape, kernel: int, stride: int, *, padding: int = 0, round_up: bool = False) -> Shape:
    """The shape after a pooling layer, which has no parameters. Caffe rounds the extent up, PyTorch down."""
    rounding: Callable[[float], int] = ceil if round_up else floor
    height, width = (rounding((extent + 2 * padding - kernel) / stride) + 1 for extent in shape[1:])
    return shape[0], height, width


class TableBuilder:
    """Collects layers in forward order; every method takes an activation's shape and returns the next one's."""

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

    def fc(self, name: str, in_features: int, out_features: int) -> int:
        """A fully connected layer with a bias; returns its width."""
        self.layers.append(LayerSpec(name, "fc", (out_features, in_features), True, 2 * out_features * in_features))
        return out_features
