"""Models and optimizers of random TensorFlow jobs (random_tensorflow.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

IN = 6
OUT = 3
KINDS = ("mlp", "conv", "embedding", "batchnorm", "twice", "functional", "subclassed", "exact")
PRECISIONS = ("float32", "float64", "mixed_bfloat16", "mixed_float16")
_kinds = keras.optimizers
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda **more: _kinds.SGD(0.25, **more),
    "momentum": lambda **more: _kinds.SGD(0.25, momentum=0.5, nesterov=True, **more),
    "adam": lambda **more: _kinds.Adam(0.02, epsilon=1e-2, **more),
    "adamw": lambda **more: _kinds.AdamW(0.02, epsilon=1e-2, weight_decay=0.01, **more),
    "rmsprop": lambda **more: _kinds.RMSprop(0.02, epsilon=1e-1, **more),
    "adagrad": lambda **more: _kinds.Adagrad(0.1, epsilon=1e-2, **more),
    "nadam": lambda **more: _kinds.Nadam(0.02, epsilon=1e-2, **more),
    "lamb": lambda **more: _kinds.Lamb(0.02, epsilon=1e-2, **more),
    "scheduled": lambda **more: _kinds.SGD(_kinds.schedules.ExponentialDecay(0.25, 2, 0.5), **more),
}
EXACT_OPTIMIZERS = ("sgd", "momentum")


class Subclassed(keras.Model):
    """A model whose layers lie in attributes, with a training step of its own."""

    def __init__(self, widths: tuple[int, ...], dtype: Any) -> None:
        super().__init__()
        self.hidden = [keras.layers.Dense(width, activation="tanh", dtype=dtype) for width in widths]
        self.last = keras.layers.Dense(OUT, use_bias=False, dtype=dtype)

    def call(self, x: Any) -> Any:
        for layer in self.hidden:
            x = layer(x)
        return self.last(x)


def build(kind: str, widths: tuple[int, ...], precision: str, seed: int, unused: bool) -> keras.Model:
    """A model that begins with the values of this seed."""
    keras.utils.set_random_seed(seed)
    layers, dtype = keras.layers, keras.dtype_policies.DTypePolicy(precision)
    if kind == "subclassed":
        model = Subclassed(widths, dtype)
        model(np.zeros((1, IN), "float32"))
        return model
    given = keras.Input((IN,))
    if kind == "exact":
        parts = [layers.Dense(width, dtype=dtype, kernel_initializer=_whole(seed))(given) for width in widths]
        return keras.Model(given, layers.Concatenate(dtype=dtype)(parts) if len(parts) > 1 else parts[0])
    hidden = _beginning(kind, given, dtype)
    if kind == "twice":
        shared = layers.Dense(widths[0], activation="tanh", dtype=dtype)
        hidden = layers.Dense(widths[0], dtype=dtype)(hidden)
        for _ in widths:
            hidden = shared(hidden)
    for width in widths:
        hidden = layers.Dense(width, activation="tanh", dtype=dtype)(hidden)
        if kind == "batchnorm":
            hidden = layers.BatchNormalization(dtype=dtype)(hidden)
        elif kind == "functional":
            hidden = layers.Concatenate(dtype=dtype)([hidden, layers.LayerNormalization(dtype=dtype)(given)])
    if unused:
        layers.Dense(4, dtype=dtype)(hidden)
    outputs = layers.Dense(OUT, dtype=dtype)(hidden)
    return keras.Model(given, outputs)


def _whole(seed: int) -> Callable[..., Any]:
    draw = np.random.default_rng(seed)
    return lambda shape, dtype=None: draw.integers(-3, 4, shape).astype(dtype or "float32")


def _beginning(kind: str, given: Any, dtype: Any) -> Any:
    layers = keras.layers
    if kind == "conv":
        rows = layers.Reshape((IN, 1), dtype=dtype)(given)
        return layers.Flatten(dtype=dtype)(layers.Conv1D(4, 3, activation="tanh", dtype=dtype)(rows))
    if kind == "embedding":
        ids = keras.ops.cast(keras.ops.clip(keras.ops.abs(given) * 4, 0, 9), "int32")
        return layers.Flatten(dtype=dtype)(layers.Embedding(10, 5, dtype=dtype)(ids))
    return given
