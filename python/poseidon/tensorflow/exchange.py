"""GradientExchange: the means of one model's gradients over all workers, inside a graph or eagerly."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from poseidon.adapter.agreement import check_same
from poseidon.adapter.control import Control
from poseidon.adapter.layer import SchemeChoice, WireChoice
from poseidon.adapter.layer_table import LayerTable
from poseidon.adapter.membership import Membership
from poseidon.adapter.native_look import NativeLook
from poseidon.adapter.plan_table import PlanTable, make_plan_table
from poseidon.adapter.stats import LayerSynchronization, latest_synchronization
from poseidon.adapter.step_watch import watch_steps
from poseidon.errors import InvalidArgument
from poseidon.tensorflow.context import context, job_number
from poseidon.tensorflow.steps import StepLayer
from poseidon.tensorflow.transfer import Transfer
from poseidon.tensorflow.variables import SyncedVariable, collect_variables, name_of


@dataclass(frozen=True)
class _Connected:
    """The layers of the model in a job. `own`: the variables of which this rank has gradients, in every step."""

    job: int
    here: Membership
    transfer: Transfer
    layers: dict[int, SyncedVariable]  # by the identity of the variable
    own: frozenset[int]  # the same
    steps: StepLayer
    look: NativeLook


class GradientExchange:
    """Averages the gradients of one model. `state`: further variables that must be equal on all ranks at the start.

    Use it from the thread that trains, or that traces the training step.
    """

    def __init__(self, scheme: SchemeChoice | None, wire: WireChoice | None) -> None:
        self._scheme, self._wire = scheme, wire
        self._connected: _Connected | None = None

    @tf.autograph.experimental.do_not_convert  # it decides nothing by the values of tensors
    def mean(self, gradients: Sequence[Any], variables: Sequence[Any], state: Sequence[Any]) -> list[Any]:
        """The means over all workers of these gradients of `variables`. A gradient that no rank has stays None.

        A rank without a gradient that others have counts as zeros. The first call is collective: it compares the
        models, and inside a graph, which reads variables later, it gives all ranks rank 0's values. Raises
        InvalidArgument if the values differ elsewhere, or if gradients come and go.
        """
        here = context()
        here.check_met("DistributedOptimizer.apply_gradients")
        if here.recovers and here.recovered_exchange is not self:
            raise InvalidArgument(
                "a DistributedOptimizer that is not the one with which the model of fit was compiled: a replacement "
                "would not get its state; compile the model with it, or train with on_failure=abort"
            )
        if here.client is None:
            return list(gradients)
        if self._connected is None or self._connected.job != job_number():
            with tf.init_scope():
                self._connected = self._connect(here, gradients, variables, state)
        connected = self._connected
        self._check_same_gradients(connected, gradients, variables)
        layers = [connected.layers.get(id(variable)) for variable in variables]
        found = [(index, layer) for index, layer in enumerate(layers) if layer is not None]
        if connected.look.number:
            connected.transfer.look([_plain(layer.variable) for layer in connected.layers.values()], connected.look)
        values = [_dense(gradients[index], layer) for index, layer in found]
        means = connected.transfer.means(values, [layer for _, layer in found])
        result: list[Any] = [None] * len(layers)
        for (index, _), mean in zip(found, means, strict=True):
            result[index] = mean
        return result

    @property
    def steps(self) -> StepLayer | None:
        """What the ranks tell each other of their steps; None before the first one of this job."""
        connected = self._connected
        return connected.steps if connected is not None and connected.job == job_number() else None

    def plan(self) -> PlanTable:
        """What each step does with each variable. Raises InvalidArgument before the first step."""
        if self._connected is None:
            raise InvalidArgument("plan() before the first step: the layers are not known yet")
        return make_plan_table(list(self._connected.layers.values())[::-1], self._connected.here)

    def synchronization_stats(self) -> list[LayerSynchronization]:
        """When each variable was exchanged last, and its bytes. Raises InvalidArgument before the first step."""
        if self._connected is None or self._connected.here.client is None:
            raise InvalidArgument("synchronization_stats() before the first step, or after the job has ended")
        return latest_synchronization(self._connected.layers.values(), self._connected.here.client)

    def _connect(
        self, here: Membership, gradients: Sequence[Any], variables: Sequence[Any], state: Sequence[Any]
    ) -> _Connected:
        assert here.client is not None
        assert here.control is not None
        control, settings = here.control, here.settings
        _check_initialized(variables)
        check_same(control, "\n".join(f"{name_of(one)} {one.shape} {one.dtype}" for one in variables), "model")
        counts = control.sum([int(gradient is not None) for gradient in gradients])
        used = [index for index, count in enumerate(counts) if count]
        layers = collect_variables(
            [variables[index] for index in used],
            [gradients[index] for index in used],
            self._scheme,
            self._wire,
            settings,
        )
        table = LayerTable(layers)
        table.share_factors(control)
        table.connect(here.client, control)
        table.agree()
        watch_steps(here, layers, "tensorflow")
        _make_equal([*variables, *state], control, in_graph=_reads_variables_later(gradients))
        own = frozenset(id(variables[index]) for index in used if gradients[index] is not None)
        steps = StepLayer(here)
        transfer = Transfer(here, job_number(), own, steps)
        look = NativeLook(
            here, layers, lambda name: tf.as_dtype(name).as_numpy_dtype, f"tensorflow {tf.version.VERSION}"
        )
        by_variable = {id(layer.variable): layer for layer in layers}
        return _Connected(job_number(), here, transfer, by_variable, own, steps, look)

    @staticmethod
    def _check_same_gradients(connected: _Connected, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        now = {id(variable) for variable, gradient in zip(variables, gradients, strict=True) if gradient is not None}
        if now == connected.own:
            return
        names = {id(variable): name_of(variable) for variable in variables}
        names |= {identity: layer.name for identity, layer in connected.layers.items()}
        changed = sorted(names.get(identity, "?") for identity in now ^ connected.own)
        raise InvalidArgument(
            f"variables {', '.join(changed)} have gradients in some training steps and not in others: pass the same "
            "variables in every step, and use one DistributedOptimizer for each set of them"
        )


def _reads_variables_later(gradients: Sequence[Any]) -> bool:
    """Whether the gradients come from variables that a graph will read when it runs, and not before."""
    with tf.init_scope():
        outermost = tf.executing_eagerly()
    dense = [one.values if isinstance(one, tf.IndexedSlices) else one for one in gradients if one is not None]
    symbolic = all(tf.is_symbolic_tensor(one) and one.op.type != "Placeholder" for one in dense)
    return outermost and symbolic


def _check_initialized(variables: Sequence[Any]) -> None:
    """Raises InvalidArgument for variables that get their values only when the graph that is being made has run."""
    for one in variables:
        variable = _plain(one)
        if not variable.is_initialized():
            raise InvalidArgument(
                f"variable {name_of(one)} has no value yet, so that the ranks cannot be given the same: build the "
                "model before it is trained, by a keras.Input as its first layer, by model.build(input_shape), or by "
                "calling it with one batch"
            )


def _plain(variable: Any) -> tf.Variable:
    """TensorFlow's own variable in one of Keras, whatever type Keras casts it to at this point."""
    if isinstance(variable, tf.Variable):
        return variable
    held = getattr(variable, "_value", None)
    return variable.value if held is None else held


def _make_equal(variables: Sequence[Any], control: Control, in_graph: bool) -> None:
    """Collective: gives all ranks rank 0's values, or, if it is too late for that, checks that they are equal."""
    if control.sum([int(in_graph)])[0] == control.sum([1])[0]:
        control.broadcast(variables, 0)
        return
    digest = hashlib.blake2b(digest_size=16)
    for one in variables:
        digest.update(control.arrays.bytes_of(one).tobytes())
    if control.texts_if_different(digest.hexdigest()) is not None:
        control.barrier()  # nobody ends before all know
        raise InvalidArgument(
            "the ranks began with different parameters, and their first gradients are made already: call "
            "poseidon.broadcast_variables(model.variables) before the first step"
        )


def _dense(gradient: Any, layer: SyncedVariable) -> Any:
    """The gradient as one tensor of the variable's dtype; zeros if there is none. Rows of one index are added up."""
    if gradient is None:
        return tf.zeros(layer.shape, layer.dtype)
    return tf.cast(tf.convert_to_tensor(gradient), layer.dtype)
