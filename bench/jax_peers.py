#!/usr/bin/env python3
"""JAX with Poseidon, with its own collectives over Gloo, and alone: `python bench/jax_peers.py`.

The same perceptron trains in one jit on workers of this machine. "dense" is Poseidon with `poseidon.dense`, whose
gradients may travel as factors. "one" is Poseidon with one worker: what the adapter costs. The methods take turns.
Printed are the medians of their steps, and the ratios. JAX has to be installed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from peer_runs import WARM_UP, arguments, in_turn, print_steps, run

_METHODS = ("poseidon", "dense", "gloo", "alone", "one")
_RATE = 0.01


def train(method: str, args: argparse.Namespace) -> None:
    """Trains as one worker. The first one prints its seconds for each step."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if method == "gloo":
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        jax.distributed.initialize(address, num_processes=count, process_id=rank)
    draw = np.random.default_rng(0)
    shapes = itertools.pairwise([args.width] * 4 + [10])
    params = [draw.normal(0, args.width**-0.5, shape).astype(np.float32) for shape in shapes]
    inputs = draw.normal(size=(args.batch, args.width)).astype(np.float32)
    labels = draw.integers(0, 10, args.batch)

    def loss(params: list[Any], inputs: Any, labels: Any, product: Callable[..., Any] = jnp.matmul) -> Any:
        hidden = inputs
        for weight in params[:-1]:
            hidden = jax.nn.relu(product(hidden, weight))
        scores = jax.nn.log_softmax(product(hidden, params[-1]))
        return -jnp.take_along_axis(scores, labels[:, None], axis=1).mean()

    gradient = jax.value_and_grad(loss)
    if method == "gloo":
        mesh = jax.make_mesh((count,), ("data",))
        rows, whole = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for axes in (("data",), ()))
        inputs, labels = (jax.make_array_from_process_local_data(rows, one) for one in (inputs, labels))
        params = [jax.make_array_from_process_local_data(whole, one) for one in params]
    elif method != "alone":
        import poseidon.jax as poseidon

        poseidon.init()
        gradient = poseidon.value_and_grad(partial(loss, product=poseidon.dense) if method == "dense" else loss)

    @jax.jit
    def step(params: list[Any], inputs: Any, labels: Any) -> list[Any]:
        _, slopes = gradient(params, inputs, labels)
        return [weight - _RATE * slope for weight, slope in zip(params, slopes, strict=True)]

    ended = []
    for _ in range(args.steps + WARM_UP):
        params = jax.block_until_ready(step(params, inputs, labels))
        ended.append(time.perf_counter())
    print_steps(ended)


def run_one(method: str, args: argparse.Namespace) -> float:
    """The median step of the first worker, in seconds."""
    own = {"JAX_PLATFORMS": "cpu", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    return run(__file__, method, 1 if method in ("alone", "one") else args.workers, lambda _: own)


def main() -> None:
    """Prints a line for each method."""
    args = arguments(__doc__, _METHODS)
    if args.worker is not None:
        return train(args.worker, args)
    seconds = in_turn(_METHODS, args.repeats, partial(run_one, args=args))
    for method in ("poseidon", "dense"):
        print(f"{method} takes {seconds[method] / seconds['gloo']:.3f} of the step over Gloo (bar 1)")
    return None


if __name__ == "__main__":
    main()
