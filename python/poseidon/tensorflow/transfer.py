"""Transfer: gradients to the client and their means back, as operations of a graph, eagerly, or by Python."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from poseidon.adapter.membership import Membership
from poseidon.adapter.native_look import NativeLook
from poseidon.errors import ShutDown
from poseidon.schemes import takes_factors
from poseidon.tensorflow.plugin import NOT_FACTORABLE, OPERATION, plugin
from poseidon.tensorflow.steps import STEP, StepLayer
from poseidon.tensorflow.variables import SyncedVariable, factors_of


class Transfer:
    """The exchanges of one model in one job. `own`: the identities of the variables of which this rank has gradients.

    The others' gradients are given as zeros, and this rank takes part in their exchanges without a contribution.
    `steps`: in every step it also exchanges that it makes one (steps.py).
    """

    def __init__(self, here: Membership, job: int, own: frozenset[int], steps: StepLayer) -> None:
        assert here.client is not None
        self._steps = steps
        self._here, self._divisor, self._job, self._own = here, here.world_size, job, own
        self._functions: dict[tuple[int, ...], Any] = {}  # for eager execution, by the numbers of the layers
        self._plugin = plugin()
        if self._plugin is not None:
            self._plugin.use(here.client, job)

    def means(self, gradients: Sequence[Any], layers: Sequence[SyncedVariable]) -> list[Any]:
        """The means over all workers, of the same shapes and dtypes. Eagerly it blocks until all are there."""
        if self._plugin is None:
            return self._after_backward(gradients, layers)
        if not tf.executing_eagerly():
            return self._operations(gradients, layers)
        # All must start before one may be waited for, and eager execution runs one operation at a time.
        key = tuple(layer.layer for layer in layers)
        if key not in self._functions:
            self._functions[key] = tf.function(lambda *values: self._operations(values, layers), autograph=False)
        return list(self._functions[key](*gradients))

    def look(self, variables: Sequence[tf.Variable], look: NativeLook) -> None:
        """A step begins: compares the ranks' variables, before it changes them."""
        if tf.executing_eagerly():
            look.begin_step(lambda: [variable.numpy() for variable in variables])
            return
        graph = tf.compat.v1.get_default_graph()
        graph.add_to_collection(f"{OPERATION} kept", look)  # operations know its number alone
        earlier = graph.get_collection_ref(f"{OPERATION} looks")
        loaded = self._plugin
        if loaded is None:
            values = [variable.read_value() for variable in variables]

            def begin(*arrays: NDArray[Any]) -> Any:
                look.begin_step(lambda: arrays)
                return np.True_

            with tf.control_dependencies(earlier[-1:]):
                earlier.append(tf.numpy_function(begin, values, tf.bool))
            return
        of = {"look": look.number, "job": self._job, "name": OPERATION}

        def compare() -> Any:
            with tf.device("CPU:0"):
                loaded.ops.poseidon_look([variable.read_value() for variable in variables], **of)
            return tf.constant(True)

        # Models of one graph compare one after the other: all share the messages, and on all ranks in the same order.
        with tf.device("CPU:0"), tf.control_dependencies(earlier[-1:]):
            due = loaded.ops.poseidon_due(**of)
        earlier.append(tf.cond(due, compare, lambda: tf.constant(False)))

    def _is_present(self, layer: SyncedVariable) -> bool:
        return id(layer.variable) in self._own

    def _operations(self, gradients: Sequence[Any], layers: Sequence[SyncedVariable]) -> list[Any]:
        """Operations of the plugin in the present graph, each of which runs as soon as its gradient exists."""
        self._step()
        return [self._in_turn(gradient, layer) for gradient, layer in zip(gradients, layers, strict=True)]

    def _in_turn(self, gradient: Any, layer: SyncedVariable) -> Any:
        """The operation of a gradient, after that of the same layer before it in the graph, on all ranks alike."""
        with _turn_of(layer.layer) as turn:
            turn.append(mean := self._operation(gradient, layer))
        return mean

    def _step(self) -> None:
        """The operation that tells the others of this step. Nothing waits for it, and it runs all the same."""
        assert self._plugin is not None
        with _turn_of(self._steps.layer) as turn:
            told = self._plugin.exchange(tf.constant(self._steps.row(STEP)), self._steps.layer, 1, self._job)
            _run_independently(told.op)
            turn.append(told)

    def _operation(self, gradient: Any, layer: SyncedVariable) -> Any:
        factors = factors_of(gradient) if layer.counts_factors and self._is_present(layer) else None
        if factors is None:
            mean = self._of_value(gradient, layer)
        elif layer.scheme == "auto":
            mean = self._as_agreed(gradient, factors, layer)
        elif takes_factors(layer.scheme):
            mean = self._of_factors(factors, layer)
        else:
            mean = self._of_value(gradient, layer, _count(factors))
        return tf.ensure_shape(mean, layer.shape)

    def _as_agreed(self, gradient: Any, factors: tuple[Any, Any], layer: SyncedVariable) -> Any:
        """By factors in steps for which all ranks have found that these are less, and otherwise by the gradient.

        Each step's exchange tells the client how many factors all ranks had, and so decides on the next one's.
        """
        assert self._plugin is not None
        product = gradient if gradient.consumers() else None  # it is computed in any case

        def of_value() -> Any:
            value = tf.matmul(*factors, transpose_a=True) if product is None else product
            return self._of_value(value, layer, _count(factors))

        # Not before the gradient could be exchanged: by then the layer's exchange of the step before has ended.
        with tf.control_dependencies(factors):
            takes = self._plugin.takes_factors(layer.layer, self._job)
        _run_independently(takes.op)
        with tf.device(gradient.device or None):
            mean = tf.cond(takes, lambda: self._of_factors(factors, layer), of_value)
        _run_independently(mean.op if mean.op.type == "If" else mean.op.inputs[0].op)
        return mean

    def _of_factors(self, factors: tuple[Any, Any], layer: SyncedVariable) -> Any:
        assert self._plugin is not None
        mean = self._plugin.exchange_factors(*factors, layer.layer, self._divisor, self._job)
        _run_independently(mean.op)
        return mean

    def _of_value(self, value: Any, layer: SyncedVariable, count: Any = NOT_FACTORABLE) -> Any:
        assert self._plugin is not None
        mean = self._plugin.exchange(value, layer.layer, self._divisor, self._job, self._is_present(layer), count)
        _run_independently(mean.op)
        return mean

    def _after_backward(self, gradients: Sequence[Any], layers: Sequence[SyncedVariable]) -> list[Any]:
        """The same without the plugin: in one call of Python, when all gradients exist."""

        def exchange(*arrays: NDArray[Any]) -> list[NDArray[Any]]:
            client = self._here.client
            if client is None:
                raise ShutDown("this training step was compiled in a job that this process has left: compile it again")
            means = [np.array(array) for array in arrays]  # the core writes into them
            step = self._steps.row(STEP)
            client.start(self._steps.layer, step, 1)
            for mean, layer in zip(means, layers, strict=True):
                start = client.start if self._is_present(layer) else client.start_absent
                start(layer.layer, mean, self._divisor)
            for number in (self._steps.layer, *(layer.layer for layer in layers)):
                client.wait(number)
            return means

        means = tf.numpy_function(exchange, list(gradients), [gradient.dtype for gradient in gradients])
        return [tf.ensure_shape(mean, layer.shape) for mean, layer in zip(means, layers, strict=True)]


@contextlib.contextmanager
def _turn_of(layer: int) -> Iterator[list[Any]]:
    """What is made in it runs after the earlier operation of this layer in the graph. It must append itself."""
    earlier = tf.compat.v1.get_default_graph().get_collection_ref(f"{OPERATION} {layer}")
    with tf.control_dependencies(earlier[-1:]):
        yield earlier


def _count(factors: tuple[Any, Any]) -> Any:
    """Of how many factors a gradient is made, as a tensor, because the batches may have several sizes."""
    return tf.shape(factors[0], tf.int64)[0]


def _run_independently(operation: Any) -> None:
    """Takes an operation out of the order in which a graph runs operations that have effects.

    In that order each exchange would wait for the one before it, and tensors of one group for ever.
    """
    manager = getattr(operation.graph, "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(operation)
