"""What the tests of the check of TensorFlow's replicas do on every rank of one job.

    python tensorflow_replicas.py CASE ...

Prints one JSON object: the answer of each case.
"""

from __future__ import annotations

import json
import os
import sys

import keras
import pytest
import tensorflow as tf

import poseidon.tensorflow as poseidon
from tensorflow_cases import BATCH, LOSS, data, digest, mlp, own


def drifting() -> list[str]:
    """Rank 1 changes a variable between two epochs, of a compiled step and of a loop that runs eagerly."""
    x, y = data()
    told = []
    for eagerly in (False, True):
        model = mlp(0)
        model.compile(poseidon.DistributedOptimizer(keras.optimizers.SGD(0.1)), LOSS, run_eagerly=eagerly)
        model.fit(own(x), own(y), batch_size=BATCH, verbose=0)
        if poseidon.rank() == 1:
            kernel = model.trainable_variables[0]
            kernel.assign(kernel.numpy() + 1e-6)
        with pytest.raises((tf.errors.AbortedError, poseidon.PoseidonError)) as caught:
            model.fit(own(x), own(y), batch_size=BATCH, verbose=0)
        told.append(str(caught.value))
        if not eagerly:
            poseidon.shutdown()
            os.environ["MASTER_PORT"] = os.environ["SECOND_PORT"]
            poseidon.init()
    return told


def two_in_one_graph() -> list[str]:
    """Two models that one compiled step trains are compared apart, and nothing is said of them."""
    models = [mlp(seed) for seed in (1, 2)]
    optimizers = [poseidon.DistributedOptimizer(keras.optimizers.SGD(0.1)) for _ in models]
    x, y = data()

    @tf.function(autograph=False)
    def step(images: tf.Tensor, labels: tf.Tensor) -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            with tf.GradientTape() as tape:
                loss = LOSS(labels, model(images, training=True))
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    for _ in range(8):
        step(tf.constant(own(x)), tf.constant(own(y)))
    return [digest(model) for model in models]


def looks_in_program() -> list[int]:
    """By what the operations of a compiled step know what they compare."""
    model = mlp(1)
    optimizer = poseidon.DistributedOptimizer(keras.optimizers.SGD(0.1))
    x, y = data()

    @tf.function(autograph=False)
    def step(images: tf.Tensor, labels: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = LOSS(labels, model(images, training=True))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    graph = step.get_concrete_function(tf.constant(own(x)), tf.constant(own(y))).graph.as_graph_def()
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    return [node.attr["look"].i for node in nodes if "look" in node.attr]


if __name__ == "__main__":
    poseidon.init()
    answers = {name: globals()[name]() for name in sys.argv[1:]}
    print(json.dumps(answers))
