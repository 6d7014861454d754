"""The same convolutional network, trained by PyTorch, JAX or TensorFlow: `three_frameworks.py FRAMEWORK RESULT`.

Kernels are drawn by NumPy. Layouts are those of PyTorch everywhere: images are batch x channels x height x width. Each
worker has its own part of every batch. Rank R writes RESULT-R.npz: the parameters, and the bytes of a step.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

STEPS, ROWS, WORKERS, RATE = 6, 8, 4, 0.05
SHAPES = {"conv": (8, 1, 3, 3), "hidden": (512, 288), "last": (10, 512)}  # as PyTorch has them

Params = Mapping[str, Any]
HOMES = {"poseidon.torch": "process.context", "poseidon.jax": "process", "poseidon.tensorflow": "context"}
counted: list[int] = []  # bytes that this process had moved before each step, and after the last


def first_params() -> dict[str, np.ndarray[Any, Any]]:
    """The same on all ranks."""
    draw = np.random.default_rng(0)
    return {name: draw.normal(0, 0.1, shape).astype(np.float32) for name, shape in SHAPES.items()}


def batches() -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Those of all workers together."""
    draw = np.random.default_rng(1)
    for _ in range(STEPS):
        yield (
            draw.normal(size=(ROWS * WORKERS, 1, 8, 8)).astype(np.float32),
            draw.integers(0, 10, ROWS * WORKERS),
        )


def part(poseidon: Any) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Those of this rank. All ranks meet before each step, so that it is known what one has moved."""
    rank, count = poseidon.rank(), poseidon.world_size()
    for images, labels in batches():
        note_traffic(poseidon)
        rows = slice(rank * len(images) // count, (rank + 1) * len(images) // count)
        yield images[rows], labels[rows]
    note_traffic(poseidon)


def note_traffic(poseidon: Any) -> None:
    """Counts what this process has sent and received so far."""
    poseidon.barrier()
    process = importlib.import_module(f"{poseidon.__name__}.{HOMES[poseidon.__name__]}")
    client = process.context().client
    if client is not None:
        traffic = client.traffic()
        counted.append(traffic.bytes_sent + traffic.bytes_received)
    poseidon.barrier()


def by_torch() -> tuple[Params, Any]:
    """Trains with PyTorch. Alone, it is the reference."""
    import torch
    from torch.nn import functional

    import poseidon.torch as poseidon

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(1, 8, 3, bias=False)
            self.hidden = torch.nn.Linear(288, 512, bias=False)
            self.last = torch.nn.Linear(512, 10, bias=False)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            hidden = functional.relu(self.conv(images)).flatten(1)
            return self.last(functional.relu(self.hidden(hidden)))

    poseidon.init()
    network = Network()
    with torch.no_grad():
        for name, value in first_params().items():
            getattr(network, name).weight.copy_(torch.from_numpy(value))
    model = poseidon.DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for images, labels in part(poseidon):
        optimizer.zero_grad()
        functional.cross_entropy(model(torch.from_numpy(images)), torch.from_numpy(labels)).backward()
        optimizer.step()
    return {name: getattr(network, name).weight.detach().numpy() for name in SHAPES}, model


def by_jax() -> tuple[Params, Any]:
    """Trains with JAX."""
    import jax
    import jax.numpy as jnp

    import poseidon.jax as poseidon

    poseidon.init()

    def loss(params: Any, images: Any, labels: Any) -> Any:
        hidden = jax.nn.relu(jax.lax.conv(images, params["conv"], (1, 1), "VALID")).reshape(len(images), -1)
        hidden = jax.nn.relu(poseidon.dense(hidden, params["hidden"]))
        scores = jax.nn.log_softmax(poseidon.dense(hidden, params["last"]))
        return -jnp.take_along_axis(scores, labels[:, None], axis=1).mean()

    @jax.jit
    def step(params: Any, images: Any, labels: Any) -> Any:
        _, slopes = poseidon.value_and_grad(loss)(params, images, labels)
        return jax.tree.map(lambda one, slope: one - RATE * slope, params, slopes)

    # A kernel of `dense` is inputs x outputs.
    params: Any = {name: value if name == "conv" else value.T.copy() for name, value in first_params().items()}
    for images, labels in part(poseidon):
        params = jax.block_until_ready(step(params, images, labels))
    return {name: np.asarray(one if name == "conv" else one.T) for name, one in params.items()}, poseidon


def by_tensorflow() -> tuple[Params, Any]:
    """Trains with TensorFlow."""
    import keras
    import tensorflow as tf

    import poseidon.tensorflow as poseidon

    poseidon.init()
    first = first_params()
    conv = tf.Variable(first["conv"].transpose(2, 3, 1, 0), name="conv")  # height x width x inputs x outputs
    hidden, last = (tf.Variable(first[name].T, name=name) for name in ("hidden", "last"))
    optimizer = poseidon.DistributedOptimizer(keras.optimizers.SGD(RATE))
    optimizer.build([conv, hidden, last])

    @tf.function
    def step(images: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            found = tf.nn.relu(tf.nn.conv2d(tf.transpose(images, (0, 2, 3, 1)), conv, 1, "VALID"))
            flat = tf.reshape(tf.transpose(found, (0, 3, 1, 2)), (ROWS * WORKERS // poseidon.world_size(), 288))
            scores = tf.nn.relu(flat @ hidden) @ last
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores)
            loss = tf.reduce_mean(losses)
        optimizer.apply(tape.gradient(loss, [conv, hidden, last]), [conv, hidden, last])

    for images, labels in part(poseidon):
        step(tf.constant(images), tf.constant(labels))
    trained = {"conv": conv.numpy().transpose(3, 2, 0, 1), "hidden": hidden.numpy().T, "last": last.numpy().T}
    return trained, optimizer


BY_NAME: dict[str, Callable[[], tuple[Params, Any]]] = {
    "torch": by_torch,
    "jax": by_jax,
    "tensorflow": by_tensorflow,
}


def main(arguments: Sequence[str]) -> None:
    """One worker."""
    framework, result = arguments
    params, told = BY_NAME[framework]()
    poseidon = importlib.import_module(f"poseidon.{framework}")
    alone = poseidon.world_size() == 1
    planned = 0.0 if alone else sum(row.bytes for row in told.plan())
    schemes = [] if alone else sorted(one.scheme for one in told.synchronization_stats())
    steps = [after - before for before, after in itertools.pairwise(counted)]
    np.savez(f"{result}-{poseidon.rank()}.npz", steps=steps, planned=planned, schemes=schemes, **params)
    poseidon.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
