"""Attempts in a loop that belongs to somebody else, such as a Trainer, and that cannot go back by itself.

The loop makes its steps one after the other. Here a step that fails is made again where it failed, with the same
batches. The loop of a replacement begins anew, and does nothing until it has come to the step of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from poseidon.errors import SURVIVABLE, PoseidonError
from poseidon.torch.recovery.recovery import Recovery


class LoopSteps:
    """The steps of a loop that makes an update after one or more backward passes. Use it from the thread that trains.

    The loop has come to step 0. `recovery` has optimizers that make their updates at once, so no rank goes back by more
    than the step under way.
    """

    def __init__(self, recovery: Recovery) -> None:
        self._recovery = recovery
        self._step = 0  # to which the loop has come
        self._passes: list[Callable[[], Any]] = []  # of this step, so far
        self._attempt: AbstractContextManager[None] | None = None  # that is under way

    @property
    def is_made(self) -> bool:
        """Whether this step has been made already: before this process began, or by others while it failed here."""
        return self._step < self._recovery.step

    def backward(self, make: Callable[[], Any]) -> Any:
        """Runs `make`, forward and backward of one batch, and returns what it returns. Not if the step `is_made`.

        After a failure it runs all passes of the step again. If that shows that the step `is_made` it returns None, and
        the loop must not make its update.
        """
        self._passes.append(make)
        passes = [make]
        while not self.is_made:
            if self._attempt is None:
                self._begin()
                passes = self._passes
            try:
                return [one() for one in passes][-1]
            except BaseException as error:
                self._end(error)
                if not isinstance(error, SURVIVABLE):
                    raise
        return None

    def complete(self) -> None:
        """The loop has come to the end of the step, with its update."""
        if not self.is_made:
            self._end(None)
        self._step += 1
        self._passes.clear()

    def finish(self) -> None:
        """The loop is over. Returns when all ranks have made its steps. Collective."""
        if self._recovery.until(self._step):
            raise self._went_back()

    def _begin(self) -> None:
        attempt = self._recovery.attempt()
        attempt.__enter__()
        self._attempt = attempt
        if self._recovery.step != self._step:
            raise self._went_back()

    def _end(self, error: BaseException | None) -> None:
        """Ends the attempt: by this error, after which the workers have met again if it is of others, or by none."""
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            raise PoseidonError("a step ended without a backward pass, and other workers wait for its gradients")
        attempt.__exit__(*((None, None, None) if error is None else (type(error), error, error.__traceback__)))
        if self._recovery.step < self._step:
            raise self._went_back()

    def _went_back(self) -> PoseidonError:
        return PoseidonError(
            f"the workers go on with step {self._recovery.step}, and this loop is at step {self._step} and cannot go "
            "back: end all workers, and start them again"
        )
