"""Recovery: a training loop that goes on when a worker is lost, with the bits of one in which none was."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from poseidon.adapter import recovery
from poseidon.adapter.training_state import OwnState
from poseidon.errors import InvalidArgument, Mismatch
from poseidon.torch.local_sgd.local_sgd import LocalSGD
from poseidon.torch.process.context import context
from poseidon.torch.recovery.objects import TrainingObjects


class LocalObjects(TrainingObjects, OwnState):
    """A `LocalSGD`, the model that it trains, and everything else that a step changes.

    Every rank has a state of its own between two averagings.
    """

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


class Recovery(recovery.Recovery):
    """Trains in attempts. An attempt that fails because another worker is lost is made again, with its replacement.

        recovery = poseidon.Recovery(model, optimizer, scheduler, seed=0)
        while recovery.until(steps):
            with recovery.attempt():
                inputs, targets = batch(recovery.step, poseidon.rank(), poseidon.world_size())
                ...

    `objects` are every poseidon.DistributedDataParallel of the job, one of them first, and everything else that a step
    changes: optimizers, schedulers, a GradScaler, averages of weights; anything with state_dict() and
    load_state_dict(). With `seed`, every attempt seeds torch's, NumPy's and Python's random numbers from it, the rank
    and the step. Without it they go on, and a replacement has its own. `undo=False` avoids a copy of parameters and
    optimizer state. It is allowed if nothing is exchanged between an optimizer's step() and the end of the attempt.

    Rank 0 writes a snapshot to `directory` every `every` steps and keeps the newest `keep`. If all processes are new,
    they go on from the newest snapshot. With on_failure=abort, or one worker, `Recovery` does nothing else.

    With update="server" all ranks go back to a version that the servers have saved in `checkpoint_dir`. It replaces
    `directory` and `undo`. Each attempt then makes one synchronizing backward.

    The first object may be a poseidon.LocalSGD instead, which brings its model. Then every rank saves its own state in
    `directory`, after the first averaging that follows `every` steps, and all ranks go back to the newest state that
    all of them have. See docs/local-sgd.md.

    Collective: with on_failure=rejoin or shrink the workers meet here, not in `init`. Raises InvalidArgument for
    objects without a state, Mismatch if the ranks differ, and PoseidonTimeout naming the ranks that did not come. Use
    it from the thread that trains. See docs/recovery.md.
    """

    def __init__(
        self,
        *objects: Any,
        seed: int | None = None,
        undo: bool = True,
        directory: str | os.PathLike[str] | None = None,
        every: int = 100,
        keep: int = 2,
    ) -> None:
        here = context()
        if not undo and here.shard_group is not None:
            raise InvalidArgument(
                "undo=False, and the shards of a replica may have to go back to the beginning of a step after an "
                "optimizer's step(): leave undo out"
            )
        local = bool(objects) and isinstance(objects[0], LocalSGD)
        state = LocalObjects(objects, seed) if local else TrainingObjects(objects, seed, here.recovers, undo)
        super().__init__(state, here, directory, every, keep)
