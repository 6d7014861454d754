"""Recovery: a training loop that goes on when a worker is lost, with the bits of one in which none was."""

from __future__ import annotations

import os
from typing import Any

from poseidon.adapter import recovery
from poseidon.errors import InvalidArgument
from poseidon.torch.process.context import context
from poseidon.torch.recovery.objects import TrainingObjects


class Recovery(recovery.Recovery):
    """Trains in attempts: one that fails because another worker is lost is made again, with its replacement.

        recovery = poseidon.Recovery(model, optimizer, scheduler, seed=0)
        while recovery.until(steps):
            with recovery.attempt():
                inputs, targets = batch(recovery.step, poseidon.rank(), poseidon.world_size())
                ...

    `objects`: every poseidon.DistributedDataParallel of the job, the first one first, and whatever else a step
    changes: optimizers, schedulers, a GradScaler, averages of weights; anything with state_dict() and
    load_state_dict(). `seed`: every attempt seeds torch's, NumPy's and Python's random numbers from it, the rank and
    the step; None: they run on, and a worker that replaces another has its own. `undo=False` saves a copy of parameters
    and optimizer state, where nothing is exchanged between an optimizer's step() and the end of the attempt.

    `directory`: rank 0 writes a snapshot there every `every` steps and keeps the newest `keep`; when all processes are
    new, they go on from the newest. With on_failure=abort, or one worker, that is all that is left of it.

    With update="server" all ranks go back to a version that the servers have saved in `checkpoint_dir`, which takes the
    place of `directory` and `undo`; each attempt then makes one synchronizing backward.

    Collective: with on_failure=rejoin or shrink the workers meet here, not in `init`. Raises InvalidArgument for
    objects without a state, Mismatch where the ranks differ, PoseidonTimeout naming who did not come. Used from the
    thread that trains. See docs/recovery.md.
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
        if every < 1:
            raise InvalidArgument(f"every is {every}: a snapshot is written after one step or more")
        here = context()
        super().__init__(TrainingObjects(objects, seed, here.recovers, undo), here, directory, every, keep)
