"""Gradients that count by the number of rows of which they are the mean.

The mean over the workers of w·g·P/Σw is the mean over all rows: Σ(w·g)/Σw. So each rank scales what it contributes,
and everything else stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable

from poseidon.adapter.control import Control
from poseidon.adapter.membership import Membership
from poseidon.errors import InvalidArgument


class Weight:
    """This rank's weight among all. Used from the thread that trains."""

    def __init__(self) -> None:
        self.given = False
        self._is_stale = False  # given, and the job has other workers since
        self._scale = 1.0
        self._sum: Callable[[], list[int]] | None = None  # what waits for the sum over the ranks
        self._numerator = 0
        self._control: Control | None = None  # of the membership whose ranks have the weights

    def connect(self, control: Control) -> None:
        """The job's ranks are those of `control` now. Weights that were given to others do not count among them."""
        if self._control is not control:
            self._control, self._sum, self._scale = control, None, 1.0
            self._is_stale = self.given

    def set(self, weight: int, here: Membership) -> None:
        """Collective, but it waits for nobody: the sum of all weights is asked for, and needed with the first gradient.

        It does nothing with one worker. Raises InvalidArgument for a negative weight, and before a job that recovers
        has met.
        """
        if weight < 0:
            raise InvalidArgument(f"the weight is {weight}: give the number of rows, which is 0 or more")
        if here.control is None:
            if here.recovers:
                raise InvalidArgument(
                    "set_weight before poseidon.Recovery: call it in each attempt, since others may take part there"
                )
            return  # a mean over one worker
        self.given, self._is_stale = True, False
        self._numerator = weight * here.world_size
        self._sum = here.control.start_sum([weight])

    def scale(self) -> float:
        """By what this rank's gradients are multiplied. Raises InvalidArgument if all weights are 0, or of before."""
        if self._is_stale:
            raise InvalidArgument(
                "workers were replaced since set_weight: call it in each attempt of Recovery, before the forward pass"
            )
        if self._sum is not None:
            (total,) = self._sum()
            self._sum = None
            if total == 0:
                raise InvalidArgument("all ranks have weight 0, so there is no mean: some rank needs a row")
            self._scale = self._numerator / total
        return self._scale
