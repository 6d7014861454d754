"""DistributedOptimizer: an optimizer of Keras that applies the mean of all workers' gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from poseidon.adapter.layer import SchemeChoice, WireChoice
from poseidon.adapter.plan_table import PlanTable
from poseidon.adapter.stats import LayerSynchronization
from poseidon.errors import InvalidArgument
from poseidon.tensorflow.callbacks import watch_fits
from poseidon.tensorflow.context import context
from poseidon.tensorflow.exchange import GradientExchange


class _Distributed:
    """What is put before the methods of the optimizer's own class. Nothing else of the optimizer changes."""

    _poseidon_exchange: GradientExchange

    def apply(self: Any, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        """As Keras has it, with the mean of all workers' gradients: clipping and weight decay come after it."""
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        _check_variables(self, variables)
        means = self._poseidon_exchange.mean(list(grads), variables, self.variables)
        return super().apply(means, trainable_variables)  # type: ignore[misc]

    def plan(self) -> PlanTable:
        """The scheme and the bytes of each variable (poseidon.adapter.plan_table). After the first step."""
        return self._poseidon_exchange.plan()

    def synchronization_stats(self) -> list[LayerSynchronization]:
        """When each variable was exchanged last, by which scheme, and its bytes, as backward has made the gradients.

        With several workers, after a step whose results are in.
        """
        return self._poseidon_exchange.synchronization_stats()

    def __setattr__(self, name: str, value: Any) -> None:
        # LossScaleOptimizer sets this on what it is put around. It leaves out steps in which the gradients of its own
        # rank are not finite, and the other ranks would wait for this one.
        if name == "loss_scale_factor":
            raise InvalidArgument(
                "LossScaleOptimizer (which Keras adds with mixed_float16) must be inside of DistributedOptimizer: "
                "compile the model with poseidon.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer)); "
                "set a loss_scale_factor before that"
            )
        super().__setattr__(name, value)


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer, *, scheme: SchemeChoice | None = None, wire: WireChoice | None = None
) -> Any:
    """Makes an optimizer of Keras apply the mean of all workers' gradients, and returns it. It stays what it was
    otherwise: `model.fit`, `apply_gradients`, checkpoints and its state work as before.

    In a graph (`model.fit`, `tf.function`) each gradient is exchanged while backward computes the next ones, and the
    first trace gives all ranks rank 0's trainable variables and optimizer state. `scheme` and `wire` are names, or
    names by patterns of variables such as {"dense/kernel": "sfb"}; without them the options of `init()` hold.
    Raises InvalidArgument for what is no optimizer of Keras 3 on TensorFlow.
    """
    if keras.backend.backend() != "tensorflow" or not isinstance(optimizer, keras.optimizers.Optimizer):
        raise InvalidArgument(
            f"{type(optimizer).__name__} on the backend {keras.backend.backend()}: pass an optimizer of Keras 3, such "
            "as keras.optimizers.SGD(0.1), on the backend tensorflow"
        )
    if isinstance(optimizer, _Distributed):
        raise InvalidArgument("the optimizer is a DistributedOptimizer already: wrap it once")
    if tf.distribute.has_strategy():
        raise InvalidArgument("DistributedOptimizer inside of a tf.distribute.Strategy: use one of the two")
    context()  # says what is missing before init()
    watch_fits()
    kind = type(optimizer)
    optimizer._poseidon_exchange = GradientExchange(scheme, wire)
    # With the name of its own class, so that a saved model names that one and loads anywhere.
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    optimizer.__class__ = type(kind.__name__, (_Distributed, kind), named)
    return optimizer


def _check_variables(optimizer: Any, variables: Sequence[Any]) -> None:
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise InvalidArgument(
                f"variable {variable.path} is overwritten with its gradient (float8), which has no mean over workers: "
                "train without float8"
            )
