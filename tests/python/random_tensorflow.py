"""Random TensorFlow and Keras jobs: what a seed stands for, and its training on workers beside one process."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import poseidon.tensorflow as poseidon
from random_tensorflow_models import EXACT_OPTIMIZERS, IN, KINDS, OPTIMIZERS, OUT, PRECISIONS, build
from waiting import compute_for

FITS = ("fit", "fit", "fit eagerly", "batches")
LOOPS = ("graph", "graph", "eager", "xla")


@dataclass(frozen=True)
class Job:
    """One random job."""

    kind: str  # of model
    widths: tuple[int, ...]
    precision: str
    how: str  # fit, or a loop with a GradientTape
    optimizer: str
    more: tuple[tuple[str, Any], ...]  # keywords of the optimizer
    scales: bool  # with LossScaleOptimizer
    scheme: str
    wire: str
    rows: int
    uneven: bool
    frozen: str  # the first layer: always, or in the second epoch only
    unused: bool  # a layer that has no gradient
    one_rank: bool  # a variable that the loss of rank 1 alone uses
    second: bool  # another model in the same step
    reused: bool  # the batch's memory is filled again
    callbacks: tuple[str, ...]
    validates: bool  # on rank 0 alone
    per_execution: int
    between: str  # what happens between epochs
    epochs: int
    steps: int  # of an epoch


def make(seed: int) -> Job:
    """The job of a seed."""
    draw = random.Random(seed)
    kind = draw.choice(KINDS)
    exact = kind == "exact"
    precision = "float32" if exact or draw.random() < 0.6 else draw.choice(PRECISIONS)
    how = draw.choice(LOOPS if draw.random() < 0.5 else FITS)
    fits, loops = how in FITS, how in LOOPS
    more: dict[str, Any] = {}
    if not exact:
        more = draw.choice(
            [{}, {}, {"clipnorm": 0.1}, {"global_clipnorm": 0.2}, {"clipvalue": 0.02}, {"use_ema": True}]
        )
    scales = precision == "mixed_float16" or (draw.random() < 0.1 and not exact)
    if draw.random() < 0.2 and not scales and "use_ema" not in more:
        more = {**more, "gradient_accumulation_steps": 2}
    wire = "" if precision == "float64" or draw.random() < 0.85 else draw.choice(["bf16", "fp16"])
    callbacks = [one for one in ("schedule", "plateau", "edit", "stop") if draw.random() < 0.25]
    return Job(
        kind=kind,
        widths=tuple(draw.choice([1, 4, 12, 30]) for _ in range(draw.randint(1, 3))),
        precision=precision,
        how=how,
        optimizer=draw.choice(list(EXACT_OPTIMIZERS if exact else OPTIMIZERS)),
        more=tuple(more.items()),
        scales=scales,
        scheme="" if wire else draw.choice(["", "", "ps", "sfb"]),
        wire=wire,
        rows=draw.choice([2, 4]) if kind != "batchnorm" else 8,
        uneven=draw.random() < 0.25 and not exact,
        frozen=draw.choice(["", "", "", "always", "second epoch"]),
        unused=draw.random() < 0.15 and kind not in ("exact", "subclassed"),
        one_rank=draw.random() < 0.2 and loops and not exact,
        second=draw.random() < 0.25 and loops,
        reused=draw.random() < 0.4 and not fits,
        callbacks=tuple(callbacks) if how in ("fit", "fit eagerly") and not exact else (),
        validates=draw.random() < 0.2,
        per_execution=draw.choice([1, 1, 2]) if how == "fit" else 1,
        between=draw.choice(["", "", "rate", "reload", "broadcast", "restore", "barrier", "values", "late"]),
        epochs=draw.choice([1, 2, 3]),
        steps=2 * draw.randint(1, 2),
    )


def options(seed: int) -> dict[str, Any]:
    """What init() gets. Few different ones, since each costs the workers a new meeting."""
    return random.Random(seed // 25).choice(
        [
            {},
            {"small_bytes": 0, "chunk_bytes": 256},
            {"small_bytes": 1 << 15, "replica_check": 1},
            {"replica_check": 1, "priority_classes": 2},
            {"transport": "tcp", "chunk_bytes": 1024},
            {"server_cores": 0, "flows": 2},
            {"transport": "tcp", "coding": "on"},
        ]
    )


def _data(job: Job, rank: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """The examples of one rank, batch after batch."""
    draw = np.random.default_rng((rank, epoch, job.steps))
    count = job.steps * _rows(job, rank)
    if job.kind == "exact":
        return draw.integers(-2, 3, (count, IN)).astype("float32"), draw.integers(
            -2, 3, (count, sum(job.widths))
        ).astype("float32")
    return draw.normal(size=(count, IN)).astype("float32"), draw.normal(size=(count, OUT)).astype("float32")


def _rows(job: Job, rank: int) -> int:
    return job.rows + 2 * rank * job.uneven


def _loss(job: Job) -> Callable[[Any, Any], Any]:
    """Of a batch: the mean over its rows."""
    if job.kind == "exact":  # whole numbers, whose sums are exact
        return lambda y, found: tf.reduce_sum(tf.cast(y, found.dtype) * found, -1)
    return keras.losses.MeanSquaredError()


class Training:
    """The job, on its workers or, with `alone`, in one process."""

    def __init__(self, job: Job, alone: bool) -> None:
        self.job, self.alone, self.size = job, alone, poseidon.world_size()
        self.ranks = list(range(self.size)) if alone else [poseidon.rank()]
        in_graph = job.how in ("fit", "graph", "xla")
        # A graph gets the values of rank 0 by itself.
        self.model = build(
            job.kind, job.widths, job.precision, 1 if alone or not in_graph else 1 + poseidon.rank(), job.unused
        )
        keras.utils.set_random_seed(7)
        self.second = keras.Sequential([keras.Input((IN,)), keras.layers.Dense(5)])
        self.extra = keras.Variable(np.ones(2, "float32"), name="extra")
        self.loss = _loss(job)
        self.seen: list[Any] = []
        self.buffers: list[np.ndarray] = []
        self.begin(freezes=job.frozen == "always")

    def begin(self, freezes: bool) -> None:
        """Trains what is trained from now on, with new optimizers."""
        job = self.job
        trainable = [layer for layer in self.model._flatten_layers() if layer.weights and layer is not self.model]
        if len(trainable) > 1:
            trainable[0].trainable = not freezes
        kind = OPTIMIZERS[job.optimizer](**dict(job.more))
        if job.scales:
            kind = keras.optimizers.LossScaleOptimizer(kind, initial_scale=16.0)
        self.optimizer, self.other = kind, keras.optimizers.SGD(0.25)
        if not self.alone:
            scheme = {"*kernel": job.scheme} if job.scheme else None
            self.optimizer = poseidon.DistributedOptimizer(kind, scheme=scheme, wire=job.wire or None)
            self.other = poseidon.DistributedOptimizer(self.other)
        eagerly = job.how == "fit eagerly"
        self.model.compile(self.optimizer, self.loss, run_eagerly=eagerly, steps_per_execution=job.per_execution)
        self.in_graph: dict[Any, Any] = {}

    def trained(self, model: Any) -> list[Any]:
        """What a loop trains of this model."""
        return [*model.trainable_variables, *[self.extra] * (self.job.one_rank and model is self.model)]

    def gradients(self, model: Any, rank: int, x: Any, y: Any, optimizer: Any) -> tuple[Any, Any]:
        """The loss of one rank's batch, and its gradients. Those of an embedding are of some rows."""
        with tf.GradientTape() as tape:
            found = model(x, training=True)
            loss = tf.reduce_mean(self.loss(y, found)) if model is self.model else tf.reduce_mean(found**2)
            if self.job.one_rank and rank == 1 and model is self.model:
                used = tf.reduce_mean(tf.square(self.extra))
                loss += tf.cast(used, loss.dtype) * tf.cast(tf.reduce_mean(found), loss.dtype)
            scaled = optimizer.scale_loss(loss) if self.job.scales and model is self.model else loss
        return loss, tape.gradient(scaled, self.trained(model))

    def own_step(self, x: Any, y: Any) -> Any:
        """A step of a loop."""
        job, rank = self.job, self.ranks[0]
        loss, found = self.computed(self.model, rank, x, y, self.optimizer)
        self.optimizer.apply(found, self.trained(self.model))
        if job.second:
            self.other.apply(self.computed(self.second, rank, x, y, self.other)[1], self.second.trainable_variables)
        return poseidon.all_reduce(loss)

    def computed(self, model: Any, rank: int, x: Any, y: Any, optimizer: Any) -> Any:
        if self.job.how != "xla":
            return self.gradients(model, rank, x, y, optimizer)
        if model not in self.in_graph:
            self.in_graph[model] = tf.function(
                lambda x, y: self.gradients(model, rank, x, y, optimizer), jit_compile=True
            )
        return self.in_graph[model](x, y)

    def step_alone(self, batches: list[tuple[Any, Any]]) -> float:
        losses, sums = [], []
        pairs = [(self.model, self.optimizer), *[(self.second, self.other)] * self.job.second]
        for model, optimizer in pairs:
            every = [self.gradients(model, rank, *batches[rank], optimizer) for rank in self.ranks]
            sums.append([_mean(parts) for parts in zip(*(found for _, found in every), strict=True)])
            losses.append(_mean(tuple(loss for loss, _ in every)))  # rounded as all_reduce rounds it
        for (model, optimizer), means in zip(pairs, sums, strict=True):
            optimizer.apply(means, self.trained(model))
        return float(losses[0])

    def callbacks(self) -> list[Any]:
        kinds = keras.callbacks
        made = {
            "schedule": lambda: kinds.LambdaCallback(on_epoch_begin=lambda epoch, _: self.edit(0.5**epoch)),
            "plateau": lambda: kinds.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=1e-3),
            "edit": lambda: kinds.LambdaCallback(on_epoch_end=lambda epoch, _: self.edit(0.75)),
            "stop": lambda: kinds.EarlyStopping("loss", patience=1, min_delta=1e-3),
        }
        adjustable = self.job.optimizer != "scheduled"
        return [made[name]() for name in self.job.callbacks if adjustable or name != "plateau"]

    def edit(self, factor: float) -> None:
        variable = self.model.trainable_variables[-1]
        variable.assign(variable * factor)

    def train(self) -> None:
        job = self.job
        if not self.alone and (job.how in ("fit eagerly", "batches", "eager") or job.frozen == "always"):
            poseidon.broadcast_variables(self.model.variables)
        parts = [range(job.epochs)] if self.at_once() else [range(one, one + 1) for one in range(job.epochs)]
        for epochs in parts:
            if job.frozen == "second epoch" and epochs[0] in (1, 2):
                self.begin(freezes=epochs[0] == 1)
            if self.alone:
                self.fit_alone(epochs)
            elif job.how in ("fit", "fit eagerly"):
                self.fit(epochs)
            else:
                self.loop(epochs[0])
            self.between(epochs[-1])

    def at_once(self) -> bool:
        """Whether one call of fit makes all epochs, with the same examples."""
        return self.job.how in ("fit", "fit eagerly") and not self.job.between and self.job.frozen != "second epoch"

    def fit(self, epochs: range) -> None:
        x, y = _data(self.job, self.ranks[0], epochs[0])
        history = self.model.fit(
            x,
            y,
            batch_size=_rows(self.job, self.ranks[0]),
            shuffle=False,
            verbose=0,
            callbacks=self.callbacks(),
            epochs=epochs[-1] + 1,
            initial_epoch=epochs[0],
            validation_data=(x, y) if self.job.validates and self.ranks[0] == 0 else None,
        )
        self.seen += history.history["loss"]

    def fit_alone(self, epochs: range) -> None:
        fits = self.job.how in ("fit", "fit eagerly")
        callbacks = keras.callbacks.CallbackList(self.callbacks(), model=self.model)
        callbacks.on_train_begin()
        for epoch in epochs:
            callbacks.on_epoch_begin(epoch)
            losses = self.epoch_alone(epochs[0])
            callbacks.on_epoch_end(epoch, {"loss": np.mean(losses)})
            self.seen += [np.mean(losses)] if fits else losses
            if self.model.stop_training:
                break
        if fits:
            self.optimizer.finalize_variable_values(self.model.trainable_variables)

    def epoch_alone(self, epoch: int) -> list[float]:
        data, losses = [_data(self.job, rank, epoch) for rank in self.ranks], []
        for step in range(self.job.steps):
            cut = [slice(step * _rows(self.job, rank), (step + 1) * _rows(self.job, rank)) for rank in self.ranks]
            batches = [(tf.constant(x[at]), tf.constant(y[at])) for (x, y), at in zip(data, cut, strict=True)]
            losses.append(self.step_alone(batches))
        return losses

    def loop(self, epoch: int) -> None:
        job, rank = self.job, self.ranks[0]
        x, y = _data(job, rank, epoch)
        for step in range(job.steps):
            at = slice(step * _rows(job, rank), (step + 1) * _rows(job, rank))
            batch = self.given(x[at], y[at])
            if job.how == "batches":
                loss = float(self.model.train_on_batch(*batch))
                self.model.reset_metrics()
                self.seen.append(float(poseidon.all_reduce(tf.constant(loss))))
            else:
                self.seen.append(float(self.stepper()(*batch)))
            for buffer in self.buffers:
                buffer.fill(100)

    def stepper(self) -> Any:
        if self.job.how == "eager":
            return self.own_step
        if "step" not in self.in_graph:
            self.in_graph["step"] = tf.function(self.own_step, reduce_retracing=True)
        return self.in_graph["step"]

    def given(self, x: np.ndarray, y: np.ndarray) -> tuple[Any, Any]:
        """The batch, in memory that is filled again if the job does so."""
        if not self.job.reused:
            return tf.constant(x), tf.constant(y)
        if not self.buffers:
            self.buffers = [x.copy(), y.copy()]
        for buffer, values in zip(self.buffers, (x, y), strict=True):
            buffer[...] = values
        return self.buffers[0], self.buffers[1]

    def between(self, epoch: int) -> None:
        what, every = self.job.between, self.model.variables
        if what == "rate" and self.job.optimizer != "scheduled":
            rate = self.optimizer.inner_optimizer if self.job.scales else self.optimizer
            rate.learning_rate = float(rate.learning_rate) * 0.5
        elif what == "reload":
            self.model.set_weights(self.model.get_weights())
        elif what == "values":
            values = [np.float32([rank + epoch, -rank]) for rank in range(self.size)]
            for name in ("sum", "min", "max", "mean"):
                both = (
                    getattr(np, name)(values, axis=0)
                    if self.alone
                    else poseidon.all_reduce(tf.constant(values[self.ranks[0]]), name)
                )
                self.seen += np.asarray(both).tolist()
        elif self.alone:
            return
        elif what == "broadcast":
            poseidon.broadcast_variables(every)
        elif what == "restore":
            if poseidon.rank() > 0:
                self.edit(3.0)
            poseidon.broadcast_variables(self.model.trainable_variables)
        elif what == "barrier":
            poseidon.barrier()
        elif what == "late" and poseidon.rank() == epoch % self.size:
            compute_for(0.01)

    def results(self) -> list[np.ndarray]:
        """What must be equal on all ranks, and the same in one process but for rounding."""
        variables = [*self.model.trainable_variables, *self.second.trainable_variables, self.extra]
        return [np.asarray(keras.ops.convert_to_numpy(one), "float64") for one in [*variables, *self.seen]]


def _mean(parts: tuple[Any, ...]) -> Any:
    """Of one gradient or loss on each rank; None if no rank has it."""
    present = [tf.convert_to_tensor(part) for part in parts if part is not None]
    return tf.add_n(present) / len(parts) if present else None


def tolerance(job: Job) -> float:
    """How far from one process's values those of the workers may be: 0 where all sums are exact.

    Otherwise sums are made in another order, and layers with 16 bits round each step's activations and gradients.
    """
    if job.kind == "exact" and poseidon.world_size() == 2 and not job.second:
        return 0.0
    limits = {"float64": 5e-4, "float32": 5e-4, "mixed_float16": 1e-2, "mixed_bfloat16": 5e-2}
    return max(limits[job.precision], 1e-2 if job.wire else 0.0)


def run_job(seed: int) -> str:
    """Collective: trains the job of a seed, and compares rank 0's with one process. Returns a digest, equal on all."""
    keras.backend.clear_session()
    job = make(seed)
    mine = Training(job, alone=False)
    mine.train()
    ours = mine.results()
    if poseidon.rank() == 0:
        reference = Training(job, alone=True)
        reference.train()
        limit = tolerance(job)
        for found, wanted in zip(ours, reference.results(), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=limit, atol=limit)
    return hashlib.blake2b(b"".join(one.tobytes() for one in ours), digest_size=8).hexdigest()
