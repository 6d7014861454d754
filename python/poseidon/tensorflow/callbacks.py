"""Callbacks for `model.fit`: metrics that are equal on all ranks, and ranks that do not make the same steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

import keras
import numpy as np

from poseidon.tensorflow.context import context
from poseidon.tensorflow.steps import EPOCH, FIT

_watches: WeakKeyDictionary[Any, ref[FitWatch]] = WeakKeyDictionary()  # by the model, to which they lead


class MetricAverage(keras.callbacks.Callback):
    """Replaces the metrics of each epoch by their means over the workers that have them.

    `fit` does so by itself for a model with a DistributedOptimizer. For another model put it before callbacks that
    decide by metrics, such as EarlyStopping and ReduceLROnPlateau: then all ranks decide the same. Each rank counts the
    same, however many examples it has. A metric that only some ranks have is given to all.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        watch = watch_of(self.model)
        if logs is not None and (watch is None or watch.attempts is None):
            _average(logs)


class FitWatch(MetricAverage):
    """What `fit` of a model with a DistributedOptimizer does besides: a rank that ends an epoch while another one makes
    a further step ends the job with an error that says so.

    `fit` has the list of callbacks. Attributes:
        attempts: what takes the place of a call that all ranks make at the end of an epoch, and makes it again if a
            worker is lost meanwhile; it may change the logs by itself.
        end_attempt: the same for the call at the end of `fit`.
        before_step: called before any other callback hears of a batch that begins, or of the end of an epoch or `fit`.
    """

    def __init__(self, callbacks: Any) -> None:
        super().__init__()
        self.callbacks = callbacks
        self.attempts: Callable[[Callable[[], None], dict[str, Any] | None], None] | None = None
        self.end_attempt: Callable[[Callable[[], bool]], Any] | None = None
        self.before_step: Callable[[], None] | None = None

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self.before_step is not None:
            self.before_step()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self.attempts is not None:
            if self.before_step is not None:
                self.before_step()
            self.attempts(lambda: self._end_epoch(epoch, logs), logs)
        else:
            self._end_epoch(epoch, logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self.before_step is not None:
            self.before_step()
        if self.end_attempt is not None:
            self.end_attempt(self._end_fit)
        else:
            self._end_fit()

    def _end_fit(self) -> bool:
        steps = self._steps()
        if steps is not None:
            steps.end(FIT, int(self.model.optimizer.iterations))
        return True

    def _end_epoch(self, epoch: int, logs: dict[str, Any] | None) -> None:
        steps = self._steps()
        if steps is not None:
            steps.end(EPOCH, int(self.model.optimizer.iterations))
        if logs is not None and (steps is not None or self.attempts is not None):
            _average(logs)

    def _steps(self) -> Any:
        return self.model.optimizer._poseidon_exchange.steps


def watch_of(model: Any) -> FitWatch | None:
    """That of the `fit` of this model that is under way, if the model has a DistributedOptimizer."""
    found = _watches.get(model)
    return None if found is None else found()


def watch_fits() -> None:
    """Makes `fit` of every model with a DistributedOptimizer begin its list of callbacks with a FitWatch."""
    if getattr(keras.callbacks.CallbackList.__init__, "watches_fits", False):
        return
    inner = keras.callbacks.CallbackList.__init__

    @functools.wraps(inner)
    def begin(
        self: Any, callbacks: Any = None, add_history: bool = False, add_progbar: bool = False, *rest: Any, **more: Any
    ) -> None:
        model = rest[0] if rest else more.get("model")
        # Of fit, evaluate and predict, only fit asks for a history.
        if add_history and hasattr(getattr(model, "optimizer", None), "_poseidon_exchange"):
            watch = FitWatch(self)
            _watches[model] = ref(watch)
            callbacks = [watch, *(keras.tree.flatten(callbacks) if callbacks else [])]
        inner(self, callbacks, add_history, add_progbar, *rest, **more)

    begin.watches_fits = True  # type: ignore[attr-defined]
    keras.callbacks.CallbackList.__init__ = begin


def _average(logs: dict[str, Any]) -> None:
    """Collective: the means of these metrics over the ranks that have them."""
    control = context().control
    if control is None:
        return
    own = {name: float(value) for name, value in logs.items() if isinstance(value, (bool, int, float, np.number))}
    texts = control.texts_if_different("\n".join(own))
    names = list(own) if texts is None else sorted({name for text in texts for name in text.split("\n") if name})
    found = np.array([[own.get(name, 0.0), name in own] for name in names], np.float64).reshape(-1)
    control.add(found)
    logs.update((name, float(total / count)) for name, (total, count) in zip(names, found.reshape(-1, 2), strict=True))
