"""The objects of a training by `LocalSGD`: every rank has a state of its own between two averagings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from poseidon.adapter.training_state import OwnState
from poseidon.errors import InvalidArgument, Mismatch
from poseidon.torch.local_sgd.local_sgd import LocalSGD
from poseidon.torch.recovery.objects import TrainingObjects


class LocalObjects(TrainingObjects, OwnState):
    """A `LocalSGD`, the model that it trains, and everything else that a step changes."""

    def __init__(self, objects: Sequence[Any], seed: int | None) -> None:
        super().__init__(objects, seed, recovers=False, undo=True)  # all go back to a version, so nothing is undone

    def _check_first(self, objects: Sequence[Any]) -> None:
        if self.models or any(isinstance(one, LocalSGD) for one in objects[1:]):
            raise InvalidArgument(
                "Recovery takes one poseidon.LocalSGD, which comes first, and no DistributedDataParallel beside it"
            )
        self._local: LocalSGD = objects[0]

    def connect_models(self) -> None:
        self._local.connect()

    def has_exchanged(self) -> bool:
        return self._local.steps_alone == 0

    def start(self) -> None:
        self._local.push_parameters()

    def _tensors_of_model(self) -> list[torch.Tensor]:
        return [*self._local.model.parameters(), *self._local.model.buffers()]

    def collect(self, step: int, whole: bool = True) -> dict[str, Any]:
        local, *others = self._others
        first = local.state_dict() if whole else local.worker_state_dict()
        return {
            "model": self._tensors_of_model(),
            "models": [],
            "others": [first, *(one.state_dict() for one in others)],
        }

    def load(self, state: dict[str, Any], step: int, whole: bool = True) -> None:
        here, there = self._tensors_of_model(), state["model"]
        if [(one.dtype, one.shape) for one in here] != [(one.dtype, one.shape) for one in there]:
            raise Mismatch("the directory of Recovery has the state of another model: start with a new directory")
        with torch.no_grad():
            for tensor, value in zip(here, there, strict=True):
                tensor.copy_(value)
        super().load(state, step, whole)
