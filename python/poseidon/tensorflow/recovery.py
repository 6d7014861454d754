"""`RecoveryCallback`: `fit` of Keras goes on when a worker is lost, with the bits of one in which none was."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.random.seed_generator import global_seed_generator

from poseidon.adapter.compiled_state import CompiledState
from poseidon.adapter.loop_steps import LoopSteps
from poseidon.adapter.membership import Membership
from poseidon.adapter.numpy_arrays import NUMPY_ARRAYS
from poseidon.adapter.random_streams import HostStreams, step_seed
from poseidon.adapter.recovery import Recovery
from poseidon.errors import InvalidArgument
from poseidon.tensorflow.callbacks import watch_of
from poseidon.tensorflow.context import connect, context
from poseidon.tensorflow.variables import name_of

_PLAIN = (bool, int, float, str, type(None))
_OF_KERAS = ("params", "_params", "_model", "model", "monitor_op", "validation_data")  # of a callback


class FitState(CompiledState):
    """A model that `fit` trains: its variables, those of its optimizer, and how far `fit` has come.

    `others`: the callbacks that remember something. The layers' seed generators are set in each attempt.
    """

    framework_errors = (tf.errors.OpError,)
    _seed: int

    def __init__(self, model: Any, others: Iterable[Any], seed: int, here: Membership) -> None:
        super().__init__(seed, here)
        self._model, self._others = model, list(others)
        self.epoch, self.batch = 0, 0  # of the step that comes
        self.logs: dict[str, float] = {}  # of the latest epoch
        self.has_stopped = False
        self.steps: LoopSteps | None = None
        self.generation = 0  # of the graphs, which are those of one membership
        self._remembered: list[dict[str, Any]] = []  # by the callbacks, when they have heard of all before this step
        self._is_of_others = False
        self._at_start: list[dict[str, Any]] | None = None  # what callbacks had before the first step of this process

    def _variables(self) -> list[Any]:
        known = [*self._model.variables, *self._model.optimizer.variables]
        return [*known, *_untracked(self._model, known)]

    def describe(self) -> str:
        """The variables, and the seed."""
        lines = [f"{name_of(one)} {one.dtype} {tuple(one.shape)}" for one in self._variables()]
        return "\n".join([*lines, f"seed {self._seed}"])

    def begin(self, step: int, rank: int) -> None:
        super().begin(step, rank)
        for index, generator in enumerate(_seed_generators(self._model)):
            number = step_seed(step_seed(self._seed, rank, step), index, 0)
            generator.assign(np.array([number & 0xFFFFFFFF, 0], np.uint32))

    def connect_models(self) -> None:
        connect()
        self.generation += 1

    def values(self) -> list[Any]:
        return [np.array(one.numpy()) for one in self._variables()]

    def take_values(self, values: Sequence[Any]) -> None:
        for one, value in zip(self._variables(), values, strict=True):
            one.assign(value)

    def kept_values(self) -> tuple[list[Any], list[tuple[Any, Any]]]:
        """The values, and the metrics of this rank, which a step makes in its first attempt."""
        return self.values(), [(one, np.array(one.numpy())) for one in self._model.metrics_variables]

    def put_back(self, kept: Any) -> None:
        values, metrics = kept
        self.take_values(values)
        self._model.reset_metrics()
        for one, value in metrics:
            one.assign(value)

    def collect(self, step: int, whole: bool = True) -> dict[str, Any]:
        """The values, and the rest as plain data."""
        progress = {"epoch": self.epoch, "batch": self.batch, "logs": self.logs, "stopped": self.has_stopped}
        return {**super().collect(step), "fit": progress, "callbacks": self._remembered}

    def load(self, state: dict[str, Any], step: int, whole: bool = True) -> None:
        super().load(state, step)
        self.logs = state["fit"]["logs"]
        if self.steps is None or not self.steps.has_trained:  # otherwise it counts by itself
            self.epoch, self.batch = state["fit"]["epoch"], state["fit"]["batch"]
            self.has_stopped = state["fit"]["stopped"]
            self._remembered = state["callbacks"]
            self._is_of_others = bool(self._remembered)  # nobody has begun a step yet otherwise

    def before_step(self) -> None:
        """Notes what the callbacks remember before they hear of a step, or gives them what others remember there."""
        found = [_plain_attributes(one) for one in self._others]
        if self._at_start is None:
            self._at_start = found
        if self._is_of_others:
            self._is_of_others = False
            for one, remembered in zip(self._others, self._remembered, strict=True):
                _remind(one, remembered)
        else:
            pairs = zip(self._others, found, self._at_start, strict=True)
            self._remembered = [_remembered(one, now, first) for one, now, first in pairs]


class RecoveryCallback(keras.callbacks.Callback):
    """Makes `fit` go on when a worker is lost: `model.fit(..., callbacks=[poseidon.RecoveryCallback(seed=0)])`.

    The model is compiled with a DistributedOptimizer, and trains with on_failure=rejoin. A step that fails is made
    again with the same batch, and so is what the workers do together at the end of an epoch. A replacement gets the
    variables of model and optimizer, and what the other callbacks have noted since training has begun, in numbers,
    texts, arrays, lists and dicts. It passes over the batches of its first epoch that are past, and takes the metrics
    of that epoch from the others. So a worker's batches must follow from its rank, the epoch and their number alone:
    pass shuffle=False to `fit`, which is not its default, and no dataset with a random order of its own.

    The layers' random numbers are drawn from `seed`, rank and step. Rank 0 writes snapshots to `directory` every
    `every` steps, and keeps `keep`; an end of an epoch counts as a step. `fit` may be called once. Raises
    InvalidArgument where a replacement would not do what the others do.
    """

    def __init__(
        self, *, seed: int = 0, directory: str | os.PathLike[str] | None = None, every: int = 100, keep: int = 2
    ) -> None:
        super().__init__()
        self._seed = seed
        self._arguments: dict[str, Any] = {"directory": directory, "every": every, "keep": keep}
        self._left_out = 0  # batches that are still to be passed over
        self._hushed: list[Any] | None = None  # all callbacks, while these are passed over
        self.recovery: Recovery | None = None
        """The Recovery, once `fit` has begun."""

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Meets the other workers, with the model as it is at the start."""
        here = context()
        here.features.add("fixed_loop", type(self).__name__)
        here.recovered_exchange = getattr(self.model.optimizer, "_poseidon_exchange", None)
        watch = watch_of(self.model)
        if watch is None:
            raise InvalidArgument(
                "RecoveryCallback needs a model that is compiled with poseidon.DistributedOptimizer, which shares its "
                "gradients"
            )
        if self.recovery is not None and here.recovers:
            raise InvalidArgument("fit was called again, where a replacement would begin with the first call")
        if not self.model.optimizer.built:
            self.model.optimizer.build(self.model.trainable_variables)
        self._list = watch.callbacks
        others = [one for one in watch.callbacks.callbacks if one not in (self, watch)]
        self._state = state = FitState(self.model, others, self._seed, here)
        self.recovery = Recovery(state, here, **self._arguments)
        state.steps = self._steps = LoopSteps(self.recovery, HostStreams)
        self._steps.begin_at(self.recovery.step)
        watch.attempts, watch.end_attempt, watch.before_step = self._end_epoch, self._attempt, state.before_step
        self._train, self._generation = self.model.train_function, 0
        self.model.train_function = self._train_batches
        self._left_out = state.batch
        self._is_partial = state.batch > 0  # the epoch of which the metrics are those of a part
        self._iterator: Any = None
        if state.epoch or state.has_stopped:
            self.model._initial_epoch = self.params["epochs"] if state.has_stopped else state.epoch

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Some batches may be past."""
        self._state.epoch = epoch
        if self._left_out:
            self._hushed, self._list.callbacks = self._list.callbacks, [self]
        else:
            self._state.batch = 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """The last batch that is passed over is the last of which the other callbacks do not hear."""
        if self._hushed is not None and not self._left_out:
            self._list.callbacks, self._hushed = self._hushed, None

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Waits for the other workers."""
        self._state.has_stopped = bool(self.model.stop_training)
        self._steps.finish()
        self.model._initial_epoch = None
        self.model.make_train_function(force=True)

    def _train_batches(self, iterator: Any) -> Any:
        """What `fit` calls in the place of the model's own function."""
        self._check_iterator(iterator)
        batches = list(islice(iterator, self.model.steps_per_execution))
        if not batches:
            raise StopIteration
        if self._left_out:
            self._left_out -= 1
            self.model._symbolic_build(data_batch=batches[0])  # metrics have no result before
            return self._metrics()
        logs = self._attempt(lambda: self._function()(batches))
        self._state.batch += 1
        return self._metrics() if logs is None else logs

    def _metrics(self) -> Any:
        try:
            return self.model.get_metrics_result()
        except ValueError:  # a train_step of the program's own does not use them
            return {}

    def _check_iterator(self, iterator: Any) -> None:
        """Raises InvalidArgument for data that go on from epoch to epoch: a replacement would begin with the first."""
        before, self._iterator = self._iterator, (self._state.epoch, iterator)
        if before is not None and before[0] != self._state.epoch and before[1] is iterator and self._state.recovers:
            raise InvalidArgument(
                "the data go on from one epoch to the next, as an endless dataset with steps_per_epoch, and a "
                "replacement would begin with the first batch: give data that begin anew in each epoch"
            )

    def _attempt(self, make: Callable[[], Any]) -> Any:
        """Makes a step. None if others have made it, and the variables have its results."""
        result = self._steps.backward(make)
        self._steps.complete()
        return result

    def _function(self) -> Any:
        """The model's function, in graphs for the present membership."""
        if self._generation != self._state.generation:
            self._generation = self._state.generation
            self.model.make_train_function(force=True)
            self._train, self.model.train_function = self.model.train_function, self._train_batches
        return self._train

    def _end_epoch(self, end: Callable[[], None], logs: dict[str, Any] | None) -> None:
        """Runs what all workers do together at the end of an epoch, and gives this one its results."""

        def make() -> bool:
            if self._is_partial and logs is not None:  # those who have trained the whole epoch know the mean
                for name in [name for name in logs if not name.startswith("val_")]:
                    del logs[name]
            end()
            self._state.logs = {} if logs is None else {name: float(value) for name, value in logs.items()}
            return True

        if self._attempt(make) is None and logs is not None:
            logs.update(self._state.logs)
        self._is_partial = False
        self._state.epoch, self._state.batch = self._state.epoch + 1, 0


def _plain_attributes(callback: Any) -> dict[str, Any]:
    return {name: _plain(value) for name, value in vars(callback).items() if name not in _OF_KERAS and _is_plain(value)}


def _remembered(callback: Any, now: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    """What a callback has noted since the first step. The rest, such as the name of a file, is each rank's own."""
    changed = {name: value for name, value in now.items() if name not in first or not _is_same(value, first[name])}
    return {"compares": getattr(callback, "monitor_op", None) is not None, "found": changed}


def _remind(callback: Any, remembered: Mapping[str, Any]) -> None:
    # Keras's callbacks choose how to compare when they first do, and change numbers then.
    if remembered["compares"] and callback.monitor_op is None:
        callback._set_monitor_op()
    vars(callback).update(remembered["found"])


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(one) for one in value)
    if type(value) is dict:
        return all(_is_plain(one) for pair in value.items() for one in pair)
    if isinstance(value, np.ndarray):
        return NUMPY_ARRAYS.kind_of(value) is not None
    return isinstance(_plain(value), _PLAIN)


def _plain(value: Any) -> Any:
    """A copy of the containers, with Python's numbers; arrays are the same."""
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value] if isinstance(value, list) else tuple(_plain(one) for one in value)
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return value.item() if isinstance(value, np.generic) else value


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(value, other[name]) for name, value in one.items())
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return one is other
    return type(one) is type(other) and one == other


def _untracked(model: Any, known: Sequence[Any]) -> list[tf.Variable]:
    """TensorFlow's own variables that lie in the model or its layers, which Keras does not count."""
    held = {id(getattr(one, "value", one)) for one in known}
    found = [value for layer in model._flatten_layers() for value in vars(layer).values()]
    return list({id(one): one for one in found if isinstance(one, tf.Variable) and id(one) not in held}.values())


def _seed_generators(model: Any) -> list[Any]:
    """The states of those of the layers, and of the one that functions of keras.random without a seed use."""
    own = [one.state for layer in model._flatten_layers() for one in getattr(layer, "_seed_generators", [])]
    named = [one for one in model.variables if one.name == "seed_generator_state"]
    return list({id(one): one for one in (*own, *named, global_seed_generator().state)}.values())
