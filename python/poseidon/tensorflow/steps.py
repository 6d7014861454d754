"""StepLayer: what each rank does next, so that a rank that ends an epoch knows of one that makes another step.

Every training step exchanges a row with one number of each rank. A rank that comes to the end of an epoch or of `fit`
takes part in the next exchange with another number. So it learns at once if another rank trains on.
"""

from __future__ import annotations

import contextlib

import numpy as np
from numpy.typing import NDArray

from poseidon import _core
from poseidon.adapter.membership import Membership
from poseidon.errors import InvalidArgument, PoseidonError

STEP, EPOCH, FIT = 1, 2, 3
_ENDS = {EPOCH: "an epoch", FIT: "fit"}


class StepLayer:
    """The layer of one model's rows. Collective."""

    def __init__(self, here: Membership) -> None:
        assert here.client is not None
        self._here = here
        name = "what each rank does next"
        layer = _core.Layer(name, "int64", here.world_size, 0, 0, "ps")
        self.layer, _ = here.client.add_layers([layer], transient=True)

    def row(self, number: int) -> NDArray[np.int64]:
        """What this rank contributes: its number in its own place."""
        row = np.zeros(self._here.world_size, np.int64)
        row[self._here.rank] = number
        return row

    def end(self, number: int, steps: int) -> None:
        """Collective: raises InvalidArgument, and ends the job, unless all ranks are at this end (`EPOCH` or `FIT`).

        `steps`: how many this rank has made, for the error.
        """
        client = self._here.client
        if client is None:
            return
        row = self.row(number)
        client.start(self.layer, row, 1)
        client.wait(self.layer)
        others = [rank for rank, other in enumerate(row.tolist()) if other != number]
        if not others:
            return
        does = "makes another training step" if row[others[0]] == STEP else f"ends {_ENDS[int(row[others[0]])]}"
        error = InvalidArgument(
            f"rank {self._here.rank} has come to the end of {_ENDS[number]} after {steps} training steps, and rank "
            f"{others[0]} {does}: give all ranks the same number of batches in each epoch and the same epochs (cut the "
            "data so that it divides evenly, or pass steps_per_epoch), and let no callback stop one rank alone"
        )
        with contextlib.suppress(PoseidonError):
            client.abort(str(error))
        raise error
