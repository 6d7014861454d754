#!/usr/bin/env python3
"""TensorFlow with Poseidon, with its own MultiWorkerMirroredStrategy, and alone: `python bench/tensorflow_peers.py`.

The same perceptron trains in a `tf.function` on workers of this machine: `model.fit` of Keras 3 does not take the
strategy. "one" is Poseidon with one worker: what the adapter costs. The methods take turns. Printed are the medians of
their steps, and the ratios. TensorFlow has to be installed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from functools import partial
from typing import Any

from peer_runs import WARM_UP, arguments, in_turn, print_steps, run
from poseidon.launch import free_port

_METHODS = ("poseidon", "strategy", "alone", "one")
_RATE = 0.01


def train(method: str, args: argparse.Namespace) -> None:
    """Trains as one worker. The first one prints its seconds for each step."""
    import keras
    import numpy as np
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy() if method == "strategy" else None  # before all else
    draw = np.random.default_rng(0)

    def make_weights() -> list[Any]:
        sizes = [args.width] * 4 + [10]
        shapes = itertools.pairwise(sizes)
        return [tf.Variable(draw.normal(0, args.width**-0.5, shape).astype(np.float32)) for shape in shapes]

    def gradients_of(weights: list[Any], inputs: Any, labels: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            hidden = inputs
            for weight in weights[:-1]:
                hidden = tf.nn.relu(hidden @ weight)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, hidden @ weights[-1])
            loss = tf.reduce_mean(losses)
        return list(tape.gradient(loss, weights))

    if strategy is not None:
        with strategy.scope():
            weights = make_weights()

        def update(_: Any, means: list[Any]) -> None:
            for weight, mean in zip(weights, means, strict=True):
                strategy.extended.update(weight, lambda one, by: one.assign_sub(_RATE * by), args=(mean,))

        def on_replica(inputs: Any, labels: Any) -> None:
            here = tf.distribute.get_replica_context()
            found = gradients_of(weights, inputs, labels)
            here.merge_call(update, args=(here.all_reduce(tf.distribute.ReduceOp.MEAN, found),))

        step = tf.function(lambda inputs, labels: strategy.run(on_replica, args=(inputs, labels)))
    else:
        weights = make_weights()
        optimizer = keras.optimizers.SGD(_RATE)
        if method in ("poseidon", "one"):
            import poseidon.tensorflow as poseidon

            poseidon.init()
            optimizer = poseidon.DistributedOptimizer(optimizer)
        optimizer.build(weights)
        step = tf.function(lambda inputs, labels: optimizer.apply(gradients_of(weights, inputs, labels), weights))
    inputs = tf.constant(draw.normal(size=(args.batch, args.width)).astype(np.float32))
    labels = tf.constant(draw.integers(0, 10, args.batch))
    ended = []
    for _ in range(args.steps + WARM_UP):
        step(inputs, labels)
        weights[0].read_value() if strategy is None else strategy.experimental_local_results(weights[0])[0].read_value()
        ended.append(time.perf_counter())
    print_steps(ended)


def run_one(method: str, args: argparse.Namespace) -> float:
    """The median step of the first worker, in seconds."""
    count = 1 if method in ("alone", "one") else args.workers
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(count)]

    def variables(rank: int) -> dict[str, str]:
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
        return {"TF_CPP_MIN_LOG_LEVEL": "3"} | ({"TF_CONFIG": json.dumps(task)} if method == "strategy" else {})

    return run(__file__, method, count, variables)


def main() -> None:
    """Prints a line for each method."""
    args = arguments(__doc__, _METHODS)
    if args.worker is not None:
        return train(args.worker, args)
    seconds = in_turn(_METHODS, args.repeats, partial(run_one, args=args))
    print(f"poseidon takes {seconds['poseidon'] / seconds['strategy']:.3f} of the strategy's step (bar 1)")
    return None


if __name__ == "__main__":
    main()
