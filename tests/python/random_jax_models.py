"""Models of random JAX jobs (random_jax.py): plain trees, Flax Linen, Flax NNX and Equinox."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import poseidon.jax as poseidon

IN = 7
PLAIN = ("mlp", "scanned", "mapped", "branches", "conv", "embedding", "exact")
OTHERS = tuple(
    name for name, package in (("linen", "flax"), ("nnx", "flax"), ("equinox", "equinox")) if find_spec(package)
)

Forward = Callable[[Any, Any, Any], tuple[Any, Any]]
"""What parameters, other state and inputs give: outputs, and the state as it is then."""


@dataclass(frozen=True)
class Model:
    """A network: what is trained, what changes in forward besides, and forward."""

    params: Any
    rest: Any
    forward: Forward


def build(kind: str, widths: tuple[int, ...], dtype: str, dense: tuple[bool, ...], tied: bool) -> Model:
    """The same on all ranks. `dense`: of which products poseidon.dense makes factors."""
    draw = np.random.default_rng(len(widths) + 10 * widths[0])
    if kind in OTHERS:
        return {"linen": _linen, "nnx": _nnx, "equinox": _equinox}[kind](widths)

    def array(*shape: int) -> Any:
        return jnp.asarray(draw.normal(size=shape) * 0.3, dtype)

    if kind == "exact":
        return _exact(widths, draw, dense, dtype)
    if kind == "scanned":
        return _scanned(len(widths), widths[0], array)
    if kind == "mapped":
        params = {"w": array(IN, widths[0]), "b": array(widths[0]), "one": array()}
        return Model(
            params, {}, lambda p, rest, x: (jax.vmap(lambda row: _layer(row, p["w"], p["b"]) * p["one"])(x), rest)
        )
    if kind == "branches":
        return _branches(widths[0], array)
    if kind == "conv":
        return _conv(widths[0] % 5 + 1, array)
    if kind == "embedding":
        params = {"table": array(12, widths[0]), "w": array(widths[0], 3)}
        return Model(params, {}, lambda p, rest, x: (jnp.tanh(p["table"][_ids(x)].mean(1)) @ p["w"], rest))
    return _mlp(widths, array, dense, tied)


def _layer(x: Any, kernel: Any, bias: Any) -> Any:
    return jnp.tanh(x @ kernel + bias)


def _ids(x: Any) -> Any:
    return jnp.clip(jnp.abs(x.astype(jnp.float32) * 4).astype(jnp.int32), 0, 11)


def _mlp(widths: tuple[int, ...], array: Callable[..., Any], dense: tuple[bool, ...], tied: bool) -> Model:
    sizes = (IN, *widths)
    params = [{"w": array(a, b), "b": array(b)} for a, b in zip(sizes, widths, strict=False)]

    def forward(params: Any, rest: Any, x: Any) -> tuple[Any, Any]:
        for layer, is_dense in zip(params, dense, strict=False):
            product = poseidon.dense(x, layer["w"]) if is_dense and not tied else x @ layer["w"]
            x = jnp.tanh(product + layer["b"])
            if tied:
                x = jnp.tanh((x @ layer["w"].T) @ layer["w"])
        return x, rest

    return Model(params, {}, forward)


def _exact(widths: tuple[int, ...], draw: Any, dense: tuple[bool, ...], dtype: str) -> Model:
    """Whole numbers only, whose sums and products are exact: outputs count with whole numbers."""
    params = [
        {"w": jnp.asarray(draw.integers(-3, 4, (IN, width)), dtype), "b": jnp.zeros(width, dtype)} for width in widths
    ]

    def forward(params: Any, rest: Any, x: Any) -> tuple[Any, Any]:
        rows = jnp.round(x).astype(dtype)
        parts = [
            (poseidon.dense(rows, one["w"]) if is_dense else rows @ one["w"]) + one["b"]
            for one, is_dense in zip(params, dense, strict=False)
        ]
        return jnp.concatenate(parts, 1) * jnp.where(rows[:, :1] > 0, 1, -2).astype(dtype), rest

    return Model(params, {}, forward)


def _scanned(count: int, width: int, array: Callable[..., Any]) -> Model:
    params = {"first": array(IN, width), "w": array(count, width, width), "b": array(count, width)}

    def forward(params: Any, rest: Any, x: Any) -> tuple[Any, Any]:
        layers = (params["w"], params["b"])
        return jax.lax.scan(lambda one, layer: (_layer(one, *layer), None), x @ params["first"], layers)[0], rest

    return Model(params, {}, forward)


def _branches(width: int, array: Callable[..., Any]) -> Model:
    """A branch that each rank takes as its own batch says, and a loop."""
    params = {"first": array(IN, width), "left": array(width, width), "right": array(width), "again": array(width)}

    def forward(params: Any, rest: Any, x: Any) -> tuple[Any, Any]:
        hidden = x @ params["first"]
        hidden = jax.lax.cond(
            x[0, 0] > 0, lambda one: jnp.tanh(one @ params["left"]), lambda one: one * params["right"], hidden
        )
        return jax.lax.fori_loop(0, 2, lambda _, one: jnp.tanh(one + params["again"]), hidden), rest

    return Model(params, {}, forward)


def _conv(channels: int, array: Callable[..., Any]) -> Model:
    params = {"kernel": array(3, 1, channels), "scale": array(channels), "w": array(IN * channels, 2)}

    def forward(params: Any, rest: Any, x: Any) -> tuple[Any, Any]:
        found = jax.lax.conv_general_dilated(
            x[..., None], params["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )
        return jnp.tanh(found * params["scale"]).reshape(len(x), -1) @ params["w"], rest

    return Model(params, {}, forward)


def _linen(widths: tuple[int, ...]) -> Model:
    from flax import linen

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            for width in widths:
                x = linen.LayerNorm()(linen.tanh(linen.Dense(width)(x)))
            return linen.Dense(2, use_bias=False)(x)

    net = Net()
    params = jax.jit(net.init)(jax.random.key(0), jnp.zeros((1, IN)))["params"]
    return Model(params, {}, lambda params, rest, x: (net.apply({"params": params}, x), rest))


def _nnx(widths: tuple[int, ...]) -> Model:
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.first, self.norm = nnx.Linear(IN, widths[0], rngs=rngs), nnx.BatchNorm(widths[0], rngs=rngs)
            self.last = nnx.Linear(widths[0], 2, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.last(nnx.tanh(self.norm(self.first(x))))

    graph, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)

    def forward(params: Any, rest: Any, x: Any) -> tuple[Any, Any]:
        model = nnx.merge(graph, params, rest, copy=True)
        return model(x), nnx.state(model, nnx.Not(nnx.Param))

    return Model(params, rest, forward)


def _equinox(widths: tuple[int, ...]) -> Model:
    import equinox as eqx

    keys = jax.random.split(jax.random.key(0), len(widths))
    sizes = (IN, *widths)
    layers = [eqx.nn.Linear(a, b, key=key) for a, b, key in zip(sizes, widths, keys, strict=False)]
    params, static = eqx.partition(
        eqx.nn.Sequential([one for layer in layers for one in (layer, eqx.nn.Lambda(jnp.tanh))]), eqx.is_inexact_array
    )
    return Model(params, {}, lambda params, rest, x: (jax.vmap(eqx.combine(params, static))(x), rest))
