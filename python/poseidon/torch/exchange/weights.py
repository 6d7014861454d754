"""Gradients that count by the number of rows of which they are the mean.

The mean over the workers of w·g·P/Σw is the mean over all rows: Σ(w·g)/Σw. So each rank scales what it contributes,
and everything else stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from poseidon.adapter.control import Control
from poseidon.adapter.membership import Membership
from poseidon.errors import InvalidArgument
from poseidon.torch.exchange.transfer import Rows, Transfer
from poseidon.torch.model.factors import Factors


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


class WeightedTransfer(Transfer):
    """Scales what this rank contributes by its weight."""

    def __init__(self, inner: Transfer, weight: Weight) -> None:
        self._inner = inner
        self._weight = weight
        self._kept: dict[int, object] = {}  # by layer: scaled copies, which must live until the exchange is over

    def dense(self, layer: int, buffer: torch.Tensor, divisor: int, scheme: str, factor_count: int | None) -> None:
        if (scale := self._weight.scale()) != 1:
            buffer.mul_(scale)  # the result is written there
        self._inner.dense(layer, buffer, divisor, scheme, factor_count)

    def absent(self, layer: int, buffer: torch.Tensor, divisor: int, scheme: str, counts: bool = True) -> None:
        self._inner.absent(layer, buffer, divisor, scheme, counts)

    def factors(self, layer: int, factors: Factors, buffer: torch.Tensor, divisor: int, scheme: str) -> None:
        if (scale := self._weight.scale()) != 1:
            factors = factors.copy()
            factors.lefts = [left * scale for left in factors.lefts]
            self._kept[layer] = factors
        self._inner.factors(layer, factors, buffer, divisor, scheme)

    def rows(self, layer: int, rows: Rows | None, divisor: int, counts: bool = True) -> None:
        if rows is not None and (scale := self._weight.scale()) != 1:
            rows = (rows[0], rows[1] * scale)
            self._kept[layer] = rows
        self._inner.rows(layer, rows, divisor, counts)

    def result_rows(self, layer: int, like: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        return self._inner.result_rows(layer, like)

    def update(self, layer: int, gradient: torch.Tensor, parameter: torch.Tensor, divisor: int) -> None:
        if (scale := self._weight.scale()) != 1:
            gradient = gradient * scale  # .grad stays this rank's own
            self._kept[layer] = gradient
        self._inner.update(layer, gradient, parameter, divisor)

    def scale(self) -> float:
        return self._weight.scale()

    def wait(self, layers: Sequence[int]) -> None:
        self._inner.wait(layers)
        for layer in layers:
            self._kept.pop(layer, None)

    def done(self, layer: int) -> bool:
        return self._inner.done(layer)
