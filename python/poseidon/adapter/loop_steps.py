"""Attempts in a loop that belongs to somebody else, such as a Trainer, and that cannot go back by itself.

The loop makes its steps one after the other. Here a step that fails is made again where it failed, with the same
batches. The loop of a replacement begins anew, and does nothing until it has come to the step of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from poseidon.adapter.recovery import Recovery
from poseidon.adapter.training_state import RandomStreams
from poseidon.errors import PoseidonError


class LoopSteps:
    """The steps of a loop that makes an update after one or more backward passes. Use it from the thread that trains.

    The loop has come to step 0. Updates are over with their step, so no rank goes back by more than the step under way.
    `streams` gives the present states of the random streams.
    """

    def __init__(self, recovery: Recovery, streams: Callable[[], RandomStreams]) -> None:
        self._recovery = recovery
        self._streams = streams
        self._step = 0  # to which the loop has come
        # Of this step, so far. The loop may draw numbers between two passes, so each goes on from where it began.
        self._passes: list[tuple[Callable[[], Any], RandomStreams | None]] = []
        self._attempt: AbstractContextManager[None] | None = None  # that is under way
        self.has_trained = False  # this process has begun an attempt
        self.has_taken = self.is_made
        """Whether the objects have the state with which the next attempt begins, from others.

        Then the loop must make no update, and no step of a scheduler, before it comes to that."""

    @property
    def is_made(self) -> bool:
        """Whether this step has been made already: before this process began, or by others while it failed here."""
        return self._step < self._recovery.step

    def begin_at(self, step: int) -> None:
        """The loop begins at this step, with all that it counts."""
        self._step = step

    @property
    def pass_count(self) -> int:
        """Backward passes of the step under way, so far."""
        return len(self._passes)

    def guard(self, scheduler: Any) -> None:
        """Makes the loop's calls of `scheduler.step` do nothing while the state `has_taken` them."""
        kind = type(scheduler)

        def step(this: Any, *arguments: Any, **more: Any) -> None:
            if not self.has_taken:
                kind.step(this, *arguments, **more)

        # A class, because an attribute would be a part of its state.
        scheduler.__class__ = type(kind.__name__, (kind,), {"step": step, "__module__": kind.__module__})

    def backward(self, make: Callable[[], Any]) -> Any:
        """Runs `make`, forward and backward of one batch, and returns what it returns. Not if the step `is_made`.

        After a failure it runs all passes of the step again. If that shows that the step `is_made` it returns None, and
        the loop must not make its update.
        """
        # The first one goes on from where the attempt begins.
        self._passes.append((make, self._streams() if self._passes else None))
        passes = self._passes[-1:]
        while not self.is_made:
            if self._attempt is None:
                self._begin()
                passes = self._passes
            try:
                return [_run(*one) for one in passes][-1]
            except BaseException as error:
                self._end(error)  # which raises it again if it is this rank's own
        self.has_taken = True
        return None

    def complete(self) -> None:
        """The loop has come to the end of the step, with its update."""
        if not self.is_made:
            self._end(None)
        self._step += 1
        self._passes.clear()

    def finish(self) -> None:
        """The loop is over. Returns when all ranks have made its steps. Collective."""
        if self._recovery.until(self._step) or self._recovery.step != self._step:
            raise self._went_back()

    def _begin(self) -> None:
        attempt = self._recovery.attempt()
        attempt.__enter__()
        self._attempt, self.has_trained, self.has_taken = attempt, True, False
        if self._recovery.step != self._step:
            raise self._went_back()

    def _end(self, error: BaseException | None) -> None:
        """Ends the attempt: by this error, after which the workers have met again if it is of others, or by none."""
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            raise PoseidonError("a step ended without a backward pass, and other workers wait for its gradients")
        about = (None, None, None) if error is None else (type(error), error, error.__traceback__)
        if not attempt.__exit__(*about) and error is not None:
            raise error
        if self._recovery.step < self._step:
            raise self._went_back()

    def _went_back(self) -> PoseidonError:
        return PoseidonError(
            f"the workers go on with step {self._recovery.step}, and this loop is at step {self._step} and cannot go "
            "back: end all workers, and start them again"
        )


def _run(make: Callable[[], Any], streams: RandomStreams | None) -> Any:
    if streams is not None:
        streams.put_back()
    return make()
