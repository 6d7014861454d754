"""A framework of NumPy arrays on `poseidon.adapter`: trains a linear model in attempts, as one worker of a job.

    python numpy_training.py STEPS SNAPSHOTS

Prints one JSON object. It is what a framework adds to the adapter, in little.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poseidon.adapter.agreement import check_same
from poseidon.adapter.arrays import Bytes
from poseidon.adapter.layer import SyncedLayer
from poseidon.adapter.layer_rules import LayerFacts, LayerRules, LayerWishes
from poseidon.adapter.layer_table import LayerTable
from poseidon.adapter.membership import Membership
from poseidon.adapter.numpy_arrays import NUMPY_ARRAYS
from poseidon.adapter.plan_table import make_plan_table
from poseidon.adapter.priorities import Priorities
from poseidon.adapter.process import Process
from poseidon.adapter.recovery import Recovery
from poseidon.adapter.stats import StepRecord
from poseidon.adapter.training_state import RandomStreams, TrainingState

RATE = 0.05


class Variable(SyncedLayer):
    def __init__(self, name: str, value: NDArray[Any], scheme: str, wire: str, rules: LayerRules) -> None:
        is_matrix = value.ndim == 2
        rows = value.shape[0] if is_matrix else 0
        facts = LayerFacts(name, value.dtype.name, value.size, rows, gives_factors=is_matrix)
        super().__init__(facts, LayerWishes(scheme, wire), rules, value.shape, is_matrix)
        self.value = value


class Pass:
    """One backward pass."""

    def __init__(self) -> None:
        self.begin_ns = self.end_ns = time.monotonic_ns()
        self.ready: dict[SyncedLayer, int] = {}

    def recorded(self) -> Iterator[tuple[SyncedLayer, int]]:
        return iter(self.ready.items())


class LinearModel:
    """y = x·weight + bias, trained by SGD on the mean gradients of all workers."""

    def __init__(self, here: Membership) -> None:
        self._here = here
        rules = LayerRules.of(here.settings)
        self._weight = Variable("weight", np.zeros((6, 4)), here.settings.scheme, here.settings.wire, rules)
        self._bias = Variable("bias", np.zeros(4), "ps", here.settings.wire, rules)
        self.variables = [self._bias, self._weight]  # as backward finishes them
        self._layers = LayerTable(self.variables)
        self._priorities = Priorities(here.settings, self.variables)
        self.last: Pass | None = None

    def connect(self) -> None:
        assert self._here.client is not None
        assert self._here.control is not None
        check_same(self._here.control, ", ".join(f"{one.name} {one.shape}" for one in self.variables), "model")
        self._here.control.broadcast([one.value for one in self.variables], 0)
        self._layers.connect(self._here.client, self._here.control)
        self._priorities.connect(self._here.client, self._here.control)

    def train(self, inputs: NDArray[Any], targets: NDArray[Any]) -> None:
        if self._priorities.begin_recording():
            self._priorities.note_use([self._weight, self._bias])
            self._priorities.end_recording(ended_well=True)
        self._weight.count_forward_rows(len(inputs))
        error = 2 * (inputs @ self._weight.value + self._bias.value - targets) / len(inputs)
        self._layers.agree()
        self._priorities.begin_run()
        self.last = Pass()
        gradients = {self._bias: error.sum(0), self._weight: np.empty_like(self._weight.value)}
        self._start(self._bias, gradients[self._bias], [], [])
        self._start(self._weight, gradients[self._weight], [inputs], [error])
        self.last.end_ns = time.monotonic_ns()
        for one, gradient in gradients.items():
            self._here.client.wait(one.layer)  # type: ignore[union-attr]
            one.value -= RATE * gradient

    def _start(self, one: Variable, mean: NDArray[Any], lefts: Sequence[Any], rights: Sequence[Any]) -> None:
        client, divisor = self._here.client, self._here.world_size
        assert client is not None
        assert self.last is not None
        self.last.ready[one] = time.monotonic_ns()
        if one.next_scheme == "sfb":
            client.start_factors(one.layer, list(lefts), list(rights), mean, divisor, False)
            return
        if lefts:
            mean[...] = lefts[0].T @ rights[0]
        client.start(one.layer, mean, divisor)


class Streams(RandomStreams):
    def __init__(self) -> None:
        self._state = random.getstate()

    def put_back(self) -> None:
        random.setstate(self._state)


class LinearState(TrainingState):
    arrays = NUMPY_ARRAYS
    on_servers = False

    def __init__(self, model: LinearModel) -> None:
        self._model = model
        self._beginning: dict[int, list[NDArray[Any]]] = {}

    def describe(self) -> str:
        return "a linear model"

    def check_exchange(self) -> None:
        """Everything can be undone."""

    def begin(self, step: int, rank: int) -> None:
        self._beginning = {step: [one.value.copy() for one in self._model.variables]}

    def end(self) -> None:
        """There are no servers."""

    def settle(self) -> None:
        """Nothing is in flight."""

    def streams(self) -> RandomStreams | None:
        return Streams()

    def whole_steps(self, step: int) -> list[int]:
        return [step] if step in self._beginning else []

    def go_back(self, step: int) -> None:
        for one, value in zip(self._model.variables, self._beginning[step], strict=True):
            one.value[...] = value

    def connect_models(self) -> None:
        self._model.connect()

    def agree(self) -> None:
        """There are no choices."""

    def decisions(self) -> list[int]:
        return []

    def resume(self, step: int, decisions: Sequence[int]) -> None:
        """The schemes of a linear model do not change."""

    def collect(self, step: int, whole: bool = True) -> dict[str, Any]:
        return {one.name: one.value for one in self._model.variables}

    def load(self, state: dict[str, Any], step: int, whole: bool = True) -> None:
        for one in self._model.variables:
            one.value[...] = state[one.name]

    def residuals(self) -> Bytes | None:
        return None

    def note_residuals(self) -> None:
        """All schemes are exact."""

    def take_residuals(self, residuals: Bytes | None) -> None:
        """There are none."""

    def restorable(self) -> list[tuple[str, int, Any]]:
        return []

    def connect_servers(self, restored: bool) -> None:
        """There are none."""


def batch(step: int, rank: int) -> tuple[NDArray[Any], NDArray[Any]]:
    draw = np.random.default_rng((step, rank))
    return draw.integers(-3, 4, (2, 6)).astype(float), draw.integers(-3, 4, (2, 4)).astype(float)


def main(steps: int, snapshots: str) -> None:
    """Trains from the newest snapshot on."""
    process = Process(LinearState.arrays)
    process.join(None, {})
    here = process.joined()
    model = LinearModel(here)
    model.connect()
    recovery = Recovery(LinearState(model), here, snapshots, every=2, keep=2)
    began = recovery.step
    while recovery.until(steps):
        with recovery.attempt():
            model.train(*batch(recovery.step, here.rank))
    assert here.client is not None
    assert model.last is not None
    answer = {
        "began": began,
        "values": [one.value.tolist() for one in model.variables],
        "schemes": [layer.scheme for layer in StepRecord.of(model.last, here.client).layers],
        "plan": [row.layer for row in make_plan_table(model.variables, here)],
        "torch": "torch" in sys.modules,
    }
    process.end()
    print(json.dumps(answer))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
