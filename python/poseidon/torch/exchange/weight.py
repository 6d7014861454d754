"""A rank's weight among all, by which its gradients or parameters count in a mean over rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NoReturn

from poseidon.adapter.control import Control
from poseidon.adapter.membership import Membership
from poseidon.errors import InvalidArgument
from poseidon.torch.model.parameters import SyncedParameter


class Weight:
    """This rank's weight among all. Used from the thread that trains.

    Gradients may count by the number of rows of which they are the mean. The mean over the workers of w·g·P/Σw is the
    mean over all rows: Σ(w·g)/Σw. So each rank scales what it contributes, and everything else stays as it is.
    """

    def __init__(self) -> None:
        self.rows: int | None = None  # as given last; None: never
        self._is_stale = False  # given, and the job has other workers since
        self._scale = 1.0
        self._sum: Callable[[], list[int]] | None = None  # what waits for the sum over the ranks
        self._numerator = 0
        self._control: Control | None = None  # of the membership whose ranks have the weights
        self._tell: Callable[[BaseException], None] = _tell_nobody

    def connect(self, control: Control) -> None:
        """The job's ranks are those of `control` now. Weights that were given to others do not count among them."""
        if self._control is not control:
            self._control, self._sum, self._scale = control, None, 1.0
            self._is_stale = self.rows is not None

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
        self.rows, self._is_stale, self._tell = weight, False, here.abort
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

    def refuse(self, text: str) -> NoReturn:
        """Raises InvalidArgument. The others are told, since their own weights may be such that they go on."""
        error = InvalidArgument(text)
        self._tell(error)
        raise error


def _tell_nobody(_: BaseException) -> None:
    """Nobody else has a weight."""


_REMEDY = (
    "call set_weight once, before the first forward pass of the step, with the rows of all its backward passes, and "
    "multiply each pass's loss by its share of these rows"
)


class OneWeight:
    """Sees to it that all gradients of an exchange have the weight by which their sum counts.

    An exchange has what several backward passes have added up in `.grad`: `no_sync()` leaves gradients there.
    """

    def __init__(self, weight: Weight) -> None:
        self._weight = weight
        self._left: dict[SyncedParameter, int | None] = {}  # gradients that wait for an exchange, and the weight then

    def left(self, entry: SyncedParameter) -> None:
        """A backward pass that exchanges nothing has left a gradient."""
        self._left.setdefault(entry, self._weight.rows)

    def set(self, weight: int, here: Membership) -> None:
        """See `Weight.set`."""
        self._weight.set(weight, here)
        for entry in self._left:
            entry.hear_before()

    def check(self, entry: SyncedParameter, may_mix: bool = False) -> None:
        """A gradient is about to be added to this one. InvalidArgument if the two have different weights.

        `may_mix`: whoever adds it may yet clear it, and nothing is raised.
        """
        then = self._left.get(entry, self._weight.rows)
        if then == self._weight.rows:
            return
        if not entry.has_gradient():
            del self._left[entry]
        elif not may_mix:
            self._weight.refuse(
                f"the weight of this rank was {_shown(then)} when a backward pass left the gradient of {entry.name}, "
                f"and is {_shown(self._weight.rows)} in the backward pass that adds to it; one weight counts for their "
                f"sum: {_REMEDY}; or clear the gradient if it is not to count"
            )

    def check_all(self, entries: Iterable[SyncedParameter]) -> None:
        """An exchange of all `entries` begins."""
        if self._left:
            for entry in entries:
                self.check(entry)

    def refuse_passes(self, one: int | None, last: int | None, reached: bool) -> None:
        """Gradients of two forward passes that were given these weights are about to meet, or, unless backward has
        `reached` the first one, may meet: nobody can see in its output which backward pass belongs to it.
        """
        if reached:
            self._weight.refuse(
                f"backward has reached a forward pass for which this rank's weight was {_shown(one)}, and the forward "
                f"pass that came last has {_shown(last)}; one weight counts for all gradients of an exchange: "
                f"{_REMEDY}, or run each forward pass after the backward pass of the one before"
            )
        self._weight.refuse(
            f"two forward passes without a backward pass between them have the weights {_shown(one)} and "
            f"{_shown(last)}, and the output of the first one has no tensor in it that can be found; one weight counts "
            f"for all gradients of an exchange: {_REMEDY}; or return tensors in tuples, lists, dicts or dataclasses; "
            "or, if the pass was no training, run it under torch.no_grad()"
        )

    def exchanged(self) -> None:
        """All gradients are in an exchange."""
        self._left.clear()


def _shown(rows: int | None) -> str:
    return "not set" if rows is None else str(rows)
