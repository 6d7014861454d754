"""Trains a small perceptron with poseidon.jax, as one worker of a job: `python jax_training.py CASE`.

Prints one JSON object: this rank's parameters after each step, and what one process makes of all ranks' gradients.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import poseidon.jax as poseidon

STEPS = 3


def make_params(width: int = 33) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    sizes = [(7, width), (width, 65), (65, 3)]
    weights = {f"w{i}": jnp.asarray(draw.normal(size=size, scale=0.1), jnp.float32) for i, size in enumerate(sizes)}
    return weights | {"b": jnp.zeros(3, jnp.float32)}


def loss_fn(params: dict[str, Any], batch: Any) -> Any:
    hidden = jnp.tanh(batch @ params["w0"])
    hidden = jnp.tanh(hidden @ params["w1"])
    hidden = hidden @ params["w1"].T @ params["w1"]  # tied: used three times, pushed once
    return jnp.mean((hidden @ params["w2"] + params["b"]) ** 2)


def batch(step: int, rank: int) -> Any:
    rows = 5 + rank  # ranks with batches of different sizes
    return jnp.asarray(np.random.default_rng((step, rank)).normal(size=(rows, 7)), jnp.float32)


def mean_of_all(params: dict[str, Any], step: int, world_size: int) -> dict[str, Any]:
    """The gradients of all ranks, each as jax.grad gives it, added in rank order and divided."""
    gradient = jax.jit(jax.grad(loss_fn))
    parts = [jax.tree.map(np.asarray, gradient(params, batch(step, rank))) for rank in range(world_size)]
    total = parts[0]
    for part in parts[1:]:
        total = jax.tree.map(np.add, total, part)
    return jax.tree.map(lambda one: one / np.float32(world_size), total)


def exact() -> Any:
    params = kept = poseidon.broadcast(make_params())
    before = jax.tree.map(np.array, kept)
    step = jax.jit(poseidon.value_and_grad(loss_fn))
    equal = True
    for number in range(STEPS):
        _, grads = step(params, batch(number, poseidon.rank()))
        wanted = mean_of_all(params, number, poseidon.world_size())
        equal &= all(np.array_equal(grads[name], wanted[name]) for name in wanted)
        params = jax.tree.map(lambda one, slope: one - 0.01 * slope, params, grads)
    unwritten = all(np.array_equal(before[name], kept[name]) for name in kept)
    return {"equal": equal, "unwritten": unwritten, "params": {name: one.tolist() for name, one in params.items()}}


def scan() -> Any:
    """All steps in one jit, with remat; the last parameters."""
    batches = jnp.stack([batch(number, poseidon.rank())[:5] for number in range(STEPS)])

    def one_step(params: Any, rows: Any) -> Any:
        value, grads = poseidon.value_and_grad(jax.checkpoint(loss_fn))(params, rows)
        return jax.tree.map(lambda one, slope: one - 0.01 * slope, params, grads), value

    params, _ = jax.jit(lambda params: jax.lax.scan(one_step, params, batches))(poseidon.broadcast(make_params()))
    return {name: one.tolist() for name, one in params.items()}


def lost_peer() -> Any:
    params = poseidon.broadcast(make_params())
    step = jax.jit(poseidon.value_and_grad(loss_fn))
    jax.block_until_ready(step(params, batch(0, poseidon.rank())))
    if poseidon.rank() == 1:
        os._exit(9)
    try:
        jax.block_until_ready(step(params, batch(1, 0)))
    except jax.errors.JaxRuntimeError as error:
        return {"error": str(error), "failure": type(poseidon.failure()).__name__}
    return "no error"


def different() -> Any:
    params = make_params(33 + poseidon.rank())
    try:
        jax.jit(poseidon.value_and_grad(loss_fn))(params, batch(0, poseidon.rank()))
    except poseidon.PoseidonError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return "no error"


if __name__ == "__main__":
    poseidon.init(timeout=20)
    print(json.dumps({"exact": exact, "scan": scan, "lost_peer": lost_peer, "different": different}[sys.argv[1]]()))
