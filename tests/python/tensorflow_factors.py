"""What the tests of TensorFlow's factors do on every rank of one job.

    python tensorflow_factors.py CASE ...

Prints one JSON object: the answer of each case. Every case compares with the same training on one process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import poseidon.tensorflow as poseidon
from tensorflow_cases import LOSS, check_close, digest

WIDTH = 512
ROWS = 8
Batch = tuple[np.ndarray, np.ndarray]
Step = Callable[[int, Any, Any], Any]
"""Takes the step's number and a batch."""


def head(seed: int = 0, positions: int = 0, policy: str = "float32", regularized: bool = False) -> keras.Model:
    """A model with one large kernel, of which the factors are fewer bytes if batches are small."""
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    regularizer = keras.regularizers.L2(0.01) if regularized else None
    parts: list[Any] = [
        keras.Input((positions, WIDTH) if positions else (WIDTH,)),
        layers.Dense(WIDTH, name="large", dtype=policy, kernel_regularizer=regularizer),
        layers.Dense(10, dtype=policy),
    ]
    return keras.Sequential([*parts, layers.GlobalAveragePooling1D()] if positions else parts)


def batches(rows: Sequence[int], positions: int = 0) -> list[list[Batch]]:
    """The batches of each rank, which have so many rows."""
    draw = np.random.default_rng(3)
    shape = (positions, WIDTH) if positions else (WIDTH,)

    def batch(count: int) -> Batch:
        return draw.normal(size=(count, *shape)).astype(np.float32), draw.integers(0, 10, count)

    return [[batch(count) for count in rows] for _ in range(poseidon.world_size())]


def joined(parts: Sequence[Batch]) -> Batch:
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


def distributed(**more: Any) -> Any:
    return poseidon.DistributedOptimizer(keras.optimizers.SGD(0.01), **more)


def exchange_of(optimizer: Any) -> list[Any]:
    """How the large kernel was exchanged last: scheme, and K over all ranks."""
    found = [one for one in optimizer.synchronization_stats() if one.name.endswith("large/kernel")]
    return [found[0].scheme, found[0].factor_count]


def planned(optimizer: Any) -> list[Any]:
    """Scheme, K of a rank and reason of the large kernel."""
    row = next(row for row in optimizer.plan() if row.layer.endswith("large/kernel"))
    return [row.scheme, row.factor_count, row.reason]


class Seen(keras.callbacks.Callback):
    """Notes how the large kernel is exchanged after each call of the training step."""

    def __init__(self) -> None:
        super().__init__()
        self.exchanges: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.exchanges.append(exchange_of(self.model.optimizer))


def fit_all(model: keras.Model, fits: Sequence[Sequence[Batch]]) -> list[list[Any]]:
    """Calls `fit` for each of these lists of batches. Returns what each has seen."""
    every = []
    for parts in fits:
        seen = Seen()
        x, y = joined(parts)
        model.fit(x, y, batch_size=len(parts[0][1]), shuffle=False, verbose=0, callbacks=[seen])
        every.append(seen.exchanges)
    return every


def train_alone(model: keras.Model, every: Sequence[Sequence[Batch]], loss: Callable[..., Any] | None = None) -> None:
    """Trains on the batches of all ranks, each with the mean of the ranks' gradients."""
    optimizer = keras.optimizers.SGD(0.01)
    for step in zip(*every, strict=True):
        sums: list[Any] = [0.0] * len(model.trainable_variables)
        for rank, (x, y) in enumerate(step):
            with tf.GradientTape() as tape:
                value = LOSS(y, model(x, training=True)) if loss is None else loss(model, rank, x, y)
            found = tape.gradient(value, model.trainable_variables)
            sums = [one + other / len(step) for one, other in zip(sums, found, strict=True)]
        optimizer.apply(sums, model.trainable_variables)


def learnt() -> dict[str, Any]:
    """`fit` with a last batch that is smaller, with batches for which factors are more bytes, and with small ones."""
    rows = [[ROWS, ROWS, ROWS, ROWS // 2], [1024, 1024], [ROWS, ROWS]]
    every = batches([count for one in rows for count in one])
    mine = every[poseidon.rank()]
    fits = [mine[:4], mine[4:6], mine[6:]]
    reference = head()
    train_alone(reference, every)
    found: dict[str, Any] = {}
    for per_execution in (1, 3):
        model = head(poseidon.rank())
        model.compile(distributed(), LOSS, steps_per_execution=per_execution)
        found[f"seen {per_execution}"] = fit_all(model, fits)
        found[f"plan {per_execution}"] = planned(model.optimizer)
        check_close(model, reference)
        found[f"digest {per_execution}"] = digest(model)
    return found


def loop(make: Callable[[keras.Model, Any], Step], rows: Sequence[int]) -> dict[str, Any]:
    """Trains by the steps that `make(model, optimizer)` gives, with batches of which later ranks have fewer rows."""
    every = [[(x[rank:], y[rank:]) for x, y in parts] for rank, parts in enumerate(batches(rows))]
    model, reference = head(poseidon.rank()), head()
    optimizer = distributed()
    step = make(model, optimizer)
    seen = []
    for number, (x, y) in enumerate(every[poseidon.rank()]):
        step(number, tf.constant(x), tf.constant(y))
        seen.append(exchange_of(optimizer))
    train_alone(reference, every)
    check_close(model, reference)
    return {"seen": seen, "plan": planned(optimizer), "digest": digest(model)}


def gradients(model: keras.Model, x: Any, y: Any) -> list[Any]:
    with tf.GradientTape() as tape:
        loss = LOSS(y, model(x, training=True))
    found: list[Any] = tape.gradient(loss, model.trainable_variables)
    return found


def unequal() -> dict[str, Any]:
    """Batches whose sizes differ between the ranks and change."""

    def make(model: keras.Model, optimizer: Any) -> Step:
        @tf.function(reduce_retracing=True)
        def step(x: Any, y: Any) -> None:
            optimizer.apply(gradients(model, x, y), model.trainable_variables)

        return lambda _, x, y: step(x, y)

    return loop(make, [8, 12, 8, 20])


def changed() -> dict[str, Any]:
    """From the third step on rank 1 clips its gradients, so that it has no factors any more, and the others do."""

    def make(model: keras.Model, optimizer: Any) -> Step:
        @tf.function
        def step(x: Any, y: Any, clips: bool) -> None:
            found = gradients(model, x, y)
            clipped = [tf.clip_by_value(one, -1e6, 1e6) for one in found] if clips else found
            optimizer.apply(clipped, model.trainable_variables)

        return lambda number, x, y: step(x, y, number >= 2 and poseidon.rank() == 1)

    return loop(make, [8] * 5)


def used_besides() -> dict[str, Any]:
    """A step that applies the gradients in a branch, and looks at them before and after."""
    norms: list[float] = []

    def make(model: keras.Model, optimizer: Any) -> Step:
        @tf.function(reduce_retracing=True, autograph=False)
        def step(x: Any, y: Any) -> Any:
            found = gradients(model, x, y)
            before = tf.norm(found[0])

            def apply() -> Any:
                optimizer.apply(found, model.trainable_variables)
                return before

            return tf.cond(tf.shape(x)[0] > 0, apply, lambda: before), tf.norm(found[0])

        return lambda _, x, y: norms.extend(float(one) for one in step(x, y))

    found = loop(make, [8] * 3)
    return {**found, "equal norms": norms[::2] == norms[1::2] and min(norms) > 0}


def positions() -> dict[str, Any]:
    """An input with positions, whose rows all count."""
    every = batches([ROWS] * 3, positions=5)
    model, reference = head(poseidon.rank(), positions=5), head(positions=5)
    model.compile(distributed(), LOSS)
    seen = fit_all(model, [every[poseidon.rank()]])
    train_alone(reference, every)
    check_close(model, reference)
    return {"seen": seen[0], "plan": planned(model.optimizer), "digest": digest(model)}


def one_has_none() -> dict[str, Any]:
    """Rank 1 has a penalty on the kernel, so that its gradient is no product there. Factors are asked for."""
    every = batches([ROWS] * 3)
    model, reference = head(regularized=poseidon.rank() == 1), head()
    model.compile(distributed(scheme={"*large/kernel": "sfb"}), LOSS)
    seen = fit_all(model, [every[poseidon.rank()]])

    def loss(of: keras.Model, rank: int, x: Any, y: Any) -> Any:
        penalty = 0.01 * tf.reduce_sum(tf.square(of.trainable_variables[0])) if rank == 1 else 0.0
        return LOSS(y, of(x, training=True)) + penalty

    train_alone(reference, every, loss)
    check_close(model, reference)
    return {"seen": seen[0], "plan": planned(model.optimizer), "digest": digest(model)}


def never() -> list[Any]:
    """Where there are no factors: eager steps, and gradients that were cast."""
    every = batches([ROWS] * 2)
    found = []
    for eagerly, policy in ((True, "float32"), (False, "mixed_bfloat16")):
        model = head(policy=policy)
        model.compile(distributed(), LOSS, run_eagerly=eagerly)
        fit_all(model, [every[poseidon.rank()]])
        found.append([planned(model.optimizer), digest(model)])
    return found


def rounded() -> dict[str, Any]:
    """How far the first updates of both kernels are from exact ones, as a part of the largest value."""
    every = batches([ROWS])
    model, reference = head(), head()
    before = [one.numpy() for one in reference.trainable_variables]
    model.compile(distributed(scheme={"*large/kernel": "sfb"}), LOSS)
    seen = fit_all(model, [every[poseidon.rank()]])
    train_alone(reference, every)
    errors = []
    for ours, wanted, start in zip(model.trainable_variables, reference.trainable_variables, before, strict=True):
        exact = wanted.numpy() - start
        errors.append(float(np.abs(ours.numpy() - start - exact).max() / np.abs(exact).max()))
    return {"seen": seen[0][0][0], "large": errors[0], "other": errors[2]}


def one_without_compiler() -> dict[str, Any]:
    """Rank 1 cannot compile the operations. Factors are asked for."""
    if poseidon.rank() == 1:
        os.environ["CXX"] = "/no/compiler"
    every = batches([ROWS] * 3)
    model, reference = head(poseidon.rank()), head()
    model.compile(distributed(scheme={"*large/kernel": "sfb"}), LOSS)
    seen = fit_all(model, [every[poseidon.rank()]])
    train_alone(reference, every)
    check_close(model, reference)
    return {"seen": seen[0], "plan": planned(model.optimizer), "digest": digest(model)}


if __name__ == "__main__":
    poseidon.init()
    answers = {name: globals()[name]() for name in sys.argv[1:]}
    print(json.dumps(answers))
