"""What the tests of the TensorFlow adapter do on every rank of one job.

    python tensorflow_cases.py CASE ...

Prints one JSON object: the answer of each case. A case without a rank-dependent assertion compares with the same
training on one process, which every rank makes for itself.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pytest
import tensorflow as tf

import poseidon.tensorflow as poseidon
from poseidon.errors import InvalidArgument
from poseidon.tensorflow.context import context

BATCH = 8  # of one rank
STEPS = 4
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def data(steps: int = STEPS) -> tuple[np.ndarray, np.ndarray]:
    """Examples of all ranks: `steps` batches, in each of which the ranks' parts follow one another."""
    draw = np.random.default_rng(5)
    count = steps * BATCH * poseidon.world_size()
    return draw.normal(size=(count, 8, 8, 1)).astype(np.float32), draw.integers(0, 10, count)


def own(array: np.ndarray) -> np.ndarray:
    """This rank's part of each batch."""
    batches = array.reshape(-1, poseidon.world_size(), BATCH, *array.shape[1:])
    return batches[:, poseidon.rank()].reshape(-1, *array.shape[1:])


def mlp(seed: int = 0) -> keras.Model:
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Flatten(), keras.layers.Dense(24, activation="relu"), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])


def cnn(seed: int = 0) -> keras.Model:
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(24, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def fit(model: keras.Model, optimizer: Any, x: np.ndarray, y: np.ndarray, batch: int, **more: Any) -> None:
    model.compile(optimizer, LOSS, **more)
    model.fit(x, y, batch_size=batch, shuffle=False, verbose=0)


def values(model: keras.Model) -> list[np.ndarray]:
    return [variable.numpy() for variable in model.trainable_variables]


def digest(model: keras.Model) -> str:
    """Equal on all ranks whose parameters have the same bits."""
    return hashlib.blake2b(b"".join(value.tobytes() for value in values(model)), digest_size=8).hexdigest()


def check_close(model: keras.Model, reference: keras.Model) -> None:
    for ours, theirs in zip(values(model), values(reference), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)


def compare(build: Callable[..., keras.Model], optimizer: Callable[[], Any], **more: Any) -> str:
    """Trains on this rank's parts and, in one process, on all. The parameters must be equal within rounding.

    Other ranks than rank 0 begin with other parameters, which must not matter.
    """
    x, y = data()
    model, reference = build(poseidon.rank()), build(0)
    begun = values(reference)
    fit(model, poseidon.DistributedOptimizer(optimizer(), **more), own(x), own(y), BATCH)
    fit(reference, optimizer(), x, y, BATCH * poseidon.world_size())
    check_close(model, reference)
    assert any(not np.array_equal(now, then) for now, then in zip(values(model), begun, strict=True))
    return digest(model)


def fits() -> str:
    return compare(mlp, lambda: keras.optimizers.Adam(0.01))


def many_steps() -> int:
    x, y = data(20)
    optimizer = poseidon.DistributedOptimizer(keras.optimizers.SGD(0.1))
    fit(mlp(), optimizer, own(x), own(y), BATCH)
    return int(optimizer.iterations)


def convolutions() -> dict[str, Any]:
    """Also what each layer's last exchange has sent, and what the plan says."""
    x, y = data()
    model, reference = cnn(poseidon.rank()), cnn(0)
    optimizer = poseidon.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    fit(model, optimizer, own(x), own(y), BATCH)
    fit(reference, keras.optimizers.SGD(0.1, momentum=0.9), x, y, BATCH * poseidon.world_size())
    check_close(model, reference)
    client = context().client
    layers = optimizer._poseidon_exchange._connected.layers.values()
    stats = [client.layer_stats(layer.layer) for layer in layers]
    return {
        "digest": digest(model),
        "sent": sum(one.bytes_sent + one.bytes_received for one in stats),
        "told": sum(one.bytes for one in optimizer.synchronization_stats()),
        "steps": sorted({one.step for one in stats}),
        "planned": sum(row.bytes for row in optimizer.plan()),
        "plan": [row.layer.rpartition("/")[2] for row in optimizer.plan()],
    }


def optimizers() -> list[str]:
    """Everything that an optimizer does with a gradient comes after the mean."""
    kinds = keras.optimizers
    return [
        compare(mlp, lambda: kinds.AdamW(0.01, weight_decay=0.1)),
        compare(mlp, lambda: kinds.SGD(0.1, global_clipnorm=0.05)),
        compare(mlp, lambda: kinds.SGD(0.1, clipnorm=0.02, use_ema=True, ema_overwrite_frequency=2)),
        compare(mlp, lambda: kinds.Adam(0.01, gradient_accumulation_steps=2)),
    ]


def factors() -> dict[str, Any]:
    """Dense kernels by name take factors, which are multiplied in place of the gradient."""
    x, y = data()
    model, reference = mlp(0), mlp(0)
    optimizer = poseidon.DistributedOptimizer(keras.optimizers.SGD(0.1), scheme={"*/kernel": "sfb"})
    fit(model, optimizer, own(x), own(y), BATCH)
    fit(reference, keras.optimizers.SGD(0.1), x, y, BATCH * poseidon.world_size())
    check_close(model, reference)
    connected = optimizer._poseidon_exchange._connected
    stats = [context().client.layer_stats(layer.layer) for layer in connected.layers.values()]
    return {"digest": digest(model), "used": sorted({(one.scheme, one.factor_count) for one in stats})}


def automatic() -> list[str]:
    """With shapes that the graph knows, `auto` finds the layers for which factors are fewer bytes."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((512,)), keras.layers.Dense(512), keras.layers.Dense(10)])
    optimizer = poseidon.DistributedOptimizer(keras.optimizers.SGD(0.01))

    @tf.function
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x, training=True))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )

    draw = np.random.default_rng(poseidon.rank())
    for _ in range(3):
        step(tf.constant(draw.normal(size=(4, 512)), tf.float32), tf.constant(draw.integers(0, 10, 4)))
    return [row.scheme for row in optimizer.plan()] + [digest(model)]


def embeddings() -> str:
    """Gradients of a few rows, with rows that are used several times."""

    def build(seed: int = 0) -> keras.Model:
        keras.utils.set_random_seed(seed)
        return keras.Sequential(
            [keras.Input((5,)), keras.layers.Embedding(20, 6), keras.layers.Flatten(), keras.layers.Dense(10)]
        )

    x = np.random.default_rng(1).integers(0, 20, (STEPS * BATCH * poseidon.world_size(), 5))
    y = np.arange(len(x)) % 10
    model, reference = build(poseidon.rank()), build(0)
    fit(model, poseidon.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), own(x), own(y), BATCH)
    fit(reference, keras.optimizers.SGD(0.1, momentum=0.9), x, y, BATCH * poseidon.world_size())
    check_close(model, reference)
    return digest(model)


def several_steps_at_once() -> str:
    """A loop in the graph, and batches of two sizes, for which the step is traced twice."""
    x, y = data(5)
    model, reference = mlp(poseidon.rank()), mlp(0)
    optimizer = poseidon.DistributedOptimizer(keras.optimizers.SGD(0.1))
    fit(model, optimizer, own(x), own(y), BATCH, steps_per_execution=3)
    fit(reference, keras.optimizers.SGD(0.1), x, y, BATCH * poseidon.world_size())
    check_close(model, reference)
    return digest(model)


def as_it_is(value: Any) -> Any:
    return value


def train_in_a_loop(wrap: Callable[[Any], Any], part: Callable[[Any], Any], optimizer: Any, model: keras.Model) -> None:
    """Three steps, with a variable that has no gradient. `part`: of each batch, what to train with."""
    unused = keras.Variable(np.ones(3, np.float32), name="unused")
    variables = [*model.trainable_variables, unused]

    @wrap
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x, training=True))
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    x, y = data(3)
    for one, other in zip(np.split(part(x), 3), np.split(part(y), 3), strict=True):
        step(tf.constant(one), tf.constant(other))
    np.testing.assert_array_equal(unused.numpy(), np.ones(3))


def loops() -> list[str]:
    """GradientTape, eagerly and in a function, of which AutoGraph says nothing."""
    digests = []
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    tf.get_logger().addHandler(handler)
    for wrap in (as_it_is, tf.function):
        model, reference = mlp(poseidon.rank()), mlp(0)
        poseidon.broadcast_variables(model.variables)
        train_in_a_loop(wrap, own, poseidon.DistributedOptimizer(keras.optimizers.SGD(0.1)), model)
        train_in_a_loop(as_it_is, as_it_is, keras.optimizers.SGD(0.1), reference)
        check_close(model, reference)
        digests.append(digest(model))
    tf.get_logger().removeHandler(handler)
    assert not [text for text in said if "AutoGraph" in text]
    return digests


def applied_twice() -> list[float]:
    """Two gradients of one variable that are independent of each other, in one graph. What each rank has is 1 + rank
    and 10 times that, so the means are known."""
    variable = tf.Variable([0.0])
    optimizer = poseidon.DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.5))
    optimizer.build([variable])

    @tf.function
    def step(gradient: Any) -> None:
        optimizer.apply([gradient], [variable])
        optimizer.apply([10 * gradient], [variable])

    step(tf.constant([1.0 + poseidon.rank()]))
    found: list[float] = variable.numpy().tolist()
    return found


def step_with_half_used(wrap: Callable[[Any], Any]) -> list[Any]:
    """Two steps, in which only rank 1 uses the second variable. Returns what becomes of both."""
    variables = [keras.Variable(np.ones(2, np.float32)), keras.Variable(np.ones(2, np.float32))]
    optimizer = poseidon.DistributedOptimizer(keras.optimizers.SGD(1.0))

    @wrap
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variables[0] * 1.0)
            if poseidon.rank() == 1:
                loss += tf.reduce_sum(variables[1] * 4.0)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    step()
    step()
    return [variable.numpy().tolist() for variable in variables]


def unused_on_one_rank() -> list[Any]:
    """A rank without a gradient counts as zeros, in a graph and eagerly."""
    return [step_with_half_used(as_it_is), step_with_half_used(tf.function)]


def loss_scale() -> dict[str, Any]:
    """Gradients that are not finite on one rank make all ranks leave the step out."""
    variable = keras.Variable(np.ones(2, np.float32))
    optimizer = poseidon.DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=4.0)
    )

    @tf.function
    def step(factor: Any) -> None:
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(variable * factor))
        optimizer.apply_gradients(zip(tape.gradient(loss, [variable]), [variable], strict=True))

    first = np.inf if poseidon.rank() == 1 else 1.0
    for factor in (first, 0.25):
        step(tf.constant([factor, 0.25], tf.float32))
    return {"value": variable.numpy().tolist(), "scale": float(optimizer.dynamic_scale.numpy())}


def averages() -> dict[str, Any]:
    """Metrics of an epoch, and what a callback that comes later sees."""
    seen = []

    class Later(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append(logs["loss"])

    x, y = data()
    model = mlp(0)
    model.compile(poseidon.DistributedOptimizer(keras.optimizers.SGD(0.0)), LOSS, metrics=["accuracy"])
    callbacks = [poseidon.MetricAverage(), Later()]
    history = model.fit(own(x), own(y), batch_size=BATCH, verbose=0, callbacks=callbacks).history
    reference = mlp(0)
    reference.compile(keras.optimizers.SGD(0.0), LOSS, metrics=["accuracy"])
    expected = reference.evaluate(x, y, verbose=0)
    np.testing.assert_allclose([history["loss"][0], history["accuracy"][0]], expected, rtol=1e-5)
    return {"history": history, "seen": seen}


def saves() -> None:
    """A saved model names its optimizer's own class, and loads without Poseidon."""
    x, y = data()
    model = mlp(0)
    fit(model, poseidon.DistributedOptimizer(keras.optimizers.Adam(0.01)), own(x), own(y), BATCH)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.keras")
        model.save(path)
        loaded = keras.models.load_model(path)
    assert type(loaded.optimizer) is keras.optimizers.Adam
    assert int(loaded.optimizer.iterations.numpy()) == STEPS
    check_close(loaded, model)


def refusals() -> None:
    """What cannot work ends with a sentence that says what to do."""
    kinds = keras.optimizers
    with pytest.raises(InvalidArgument, match="inside of DistributedOptimizer"):
        kinds.LossScaleOptimizer(poseidon.DistributedOptimizer(kinds.SGD()))
    with pytest.raises(InvalidArgument, match="wrap it once"):
        poseidon.DistributedOptimizer(poseidon.DistributedOptimizer(kinds.SGD()))
    with pytest.raises(InvalidArgument, match="pass an optimizer of Keras 3"):
        poseidon.DistributedOptimizer("sgd")
    with pytest.raises(InvalidArgument, match="use one of the two"), tf.distribute.OneDeviceStrategy("cpu:0").scope():
        poseidon.DistributedOptimizer(kinds.SGD())
    with pytest.raises(InvalidArgument, match="before the first step"):
        poseidon.DistributedOptimizer(kinds.SGD()).plan()
    one, two = keras.Variable(np.ones(2, np.float32)), keras.Variable(np.ones(2, np.float32))
    gradient = tf.ones(2)
    optimizer = poseidon.DistributedOptimizer(kinds.SGD())
    optimizer.apply([gradient, gradient], [one, two])
    with pytest.raises(InvalidArgument, match="in some training steps and not in others"):
        optimizer.apply([gradient, None], [one, two])
    with pytest.raises(InvalidArgument, match="in some training steps and not in others"):
        optimizer.apply([gradient], [one])
    different = keras.Variable(np.full(2, poseidon.rank(), np.float32))
    with pytest.raises(InvalidArgument, match="call poseidon"):
        poseidon.DistributedOptimizer(kinds.SGD()).apply([gradient], [different])
    x, y = data()
    lazy = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10)])
    with pytest.raises(InvalidArgument, match="build the model before it is trained"):
        fit(lazy, poseidon.DistributedOptimizer(kinds.SGD()), own(x), own(y), BATCH)
    with pytest.raises(InvalidArgument, match="no parameter or module is called 'nothing'"):
        fit(mlp(0), poseidon.DistributedOptimizer(kinds.SGD(), scheme={"nothing": "ps"}), own(x), own(y), BATCH)


def compiled_by_xla() -> str:
    """The text of the error, which comes before anything is exchanged."""
    x, y = data()
    with pytest.raises(Exception, match="PoseidonExchange") as caught:
        fit(mlp(0), poseidon.DistributedOptimizer(keras.optimizers.SGD()), own(x), own(y), BATCH, jit_compile=True)
    return str(caught.value)


def values_of_all() -> list[str]:
    """all_reduce of every type and operation, in a graph and eagerly, against NumPy; what differs."""
    wrong = []
    for dtype in (tf.float32, tf.bfloat16, tf.int32, tf.uint32, tf.int8, tf.bool, tf.complex64):
        every = [tf.cast(np.arange(6).reshape(2, 3) * (r + 1) % 5, dtype) for r in range(poseidon.world_size())]
        own = {
            "array": every[poseidon.rank()],
            "number": every[poseidon.rank()][0, 1],
            "empty": tf.zeros((0, 2), dtype),
        }
        for operation in ("mean", "sum", "min", "max"):
            if dtype.is_complex and operation in ("min", "max"):
                continue
            wanted = getattr(np, operation)(np.stack([one.numpy() for one in every]), axis=0)

            def call(operation: Any = operation, own: Any = own) -> Any:
                return poseidon.all_reduce(own, operation)

            for found in (call(), tf.function(call)()):
                equal = np.array_equal(found["array"].numpy().astype(wanted.dtype), wanted)
                if not equal or found["number"].numpy() != wanted[0, 1] or found["empty"].shape != (0, 2):
                    wrong.append(f"{dtype.name} {operation}")
    return wrong


def statistics_in_the_loss() -> float:
    """Statistics of the batches of all ranks, in a loss: gradients against those of one process."""
    rows = [tf.constant(np.random.default_rng(r).normal(size=(4, 5)), tf.float32) for r in range(poseidon.world_size())]
    weight = tf.Variable(np.random.default_rng(9).normal(size=(5, 3)), dtype=tf.float32)

    @tf.function
    def gradient() -> Any:
        with tf.GradientTape() as tape:
            hidden = rows[poseidon.rank()] @ weight
            mean = poseidon.all_reduce(tf.reduce_mean(hidden, 0))
            largest = poseidon.all_reduce(tf.reduce_max(hidden), "max")
            loss = tf.reduce_mean((hidden - mean) ** 3) + largest
        return poseidon.all_reduce(tape.gradient(loss, weight))

    with tf.GradientTape() as tape:
        hidden = tf.stack([one @ weight for one in rows])
        loss = tf.reduce_mean((hidden - tf.reduce_mean(hidden, [0, 1])) ** 3) + tf.reduce_max(hidden)
    return float(tf.reduce_max(tf.abs(gradient() - tape.gradient(loss, weight))))


def callbacks_decide() -> dict[str, Any]:
    """Callbacks that decide by a metric, which rank 0 alone would see otherwise. Labels are random."""
    x, y = data(6)
    model = mlp(0)
    optimizer = poseidon.DistributedOptimizer(keras.optimizers.SGD(3.0))
    model.compile(optimizer, LOSS)
    callbacks = [
        keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1),
        keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True),
    ]
    validation = (x, y) if poseidon.rank() == 0 else None
    history = model.fit(
        own(x), own(y), batch_size=BATCH, epochs=12, verbose=0, callbacks=callbacks, validation_data=validation
    ).history
    # What changes in the memory of a batch after it was given does not matter.
    batch, labels = own(x)[:BATCH].copy(), own(y)[:BATCH].copy()
    for _ in range(3):
        model.train_on_batch(batch, labels)
        batch *= 0.5
    assert any(rate < 3.0 for rate in history["learning_rate"])
    return {"digest": digest(model), "history": history}


def uneven() -> str:
    """Rank 1 ends the first epoch a step before rank 0. Returns what each learns of it."""
    x, y = data()
    model = mlp(0)
    model.compile(poseidon.DistributedOptimizer(keras.optimizers.SGD()), LOSS)
    count = (STEPS - poseidon.rank()) * BATCH
    with pytest.raises((InvalidArgument, tf.errors.AbortedError, tf.errors.UnknownError)) as caught:
        model.fit(own(x)[:count], own(y)[:count], batch_size=BATCH, epochs=3, verbose=0)
    return str(caught.value)


def one_leaves() -> str:
    """Rank 1 makes fewer steps and ends. Returns what rank 0 learns of it."""
    x, y = data()
    model = mlp(0)
    model.compile(poseidon.DistributedOptimizer(keras.optimizers.SGD()), LOSS)
    batches = STEPS if poseidon.rank() == 0 else STEPS - 1
    if poseidon.rank() == 0:
        with pytest.raises(tf.errors.AbortedError) as caught:
            model.fit(own(x)[: batches * BATCH], own(y)[: batches * BATCH], batch_size=BATCH, verbose=0)
        return str(caught.value)
    for number in range(batches):
        model.train_on_batch(own(x)[number * BATCH :][:BATCH], own(y)[number * BATCH :][:BATCH])
    return ""


def another_job() -> str:
    """A step that was compiled in a job that is over says so; compiled again it works."""
    x, y = data()
    model = mlp(0)
    fit(model, poseidon.DistributedOptimizer(keras.optimizers.SGD(0.1)), own(x), own(y), BATCH)
    poseidon.shutdown()
    os.environ["MASTER_PORT"] = os.environ["SECOND_PORT"]
    poseidon.init()
    with pytest.raises((tf.errors.FailedPreconditionError, tf.errors.UnknownError, tf.errors.InternalError)):
        model.fit(own(x), own(y), batch_size=BATCH, verbose=0)
    fit(model, model.optimizer, own(x), own(y), BATCH)
    return digest(model)


if __name__ == "__main__":
    poseidon.init()
    answers = {name: globals()[name]() for name in sys.argv[1:]}
    print(json.dumps(answers))
