"""How tensors reach the core: from their own memory, or staged through host memory.

Each layer's exchange is started by one of `dense`, `absent`, `factors` and `update`, and ended by `wait`, after
which the result lies in the tensor that was passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from poseidon.torch.model.factors import Factors

Rows = tuple[torch.Tensor, torch.Tensor]
"""Ascending indices, of dtype int32, and the values of these rows."""


class Transfer(Protocol):
    """The calls of the client that a synchronization needs. Buffers are dense, and none may change until `wait`."""

    def dense(self, layer: int, buffer: torch.Tensor, divisor: int, scheme: str, factor_count: int | None) -> None:
        """Contributes `buffer`, which receives the mean. `factor_count`: the rows it would be as factors, if known."""

    def absent(self, layer: int, buffer: torch.Tensor, divisor: int, scheme: str, counts: bool = True) -> None:
        """Contributes nothing; `buffer` receives the others' result if there is one.

        `counts`: whether this rank is among those that the mean is over, as it is with an unused parameter.
        """

    def factors(self, layer: int, factors: Factors, buffer: torch.Tensor, divisor: int, scheme: str) -> None:
        """Contributes factors; `buffer` receives the mean."""

    def rows(self, layer: int, rows: Rows | None, divisor: int, counts: bool = True) -> None:
        """Contributes rows to a layer that goes by the scheme `rows`, or nothing. `result_rows` has the mean.

        `counts`: as for `absent`.
        """

    def result_rows(self, layer: int, like: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """After `wait`: the indices (None: all) and values of the rows that some rank had.

        `like`: rows of the same dtype, device and number of columns.
        """

    def update(self, layer: int, gradient: torch.Tensor, parameter: torch.Tensor, divisor: int) -> None:
        """Contributes `gradient` to a stored layer; `parameter` receives what the servers make of it."""

    def scale(self) -> float:
        """By what gradients are multiplied before they are sent."""
        return 1.0

    def wait(self, layers: Sequence[int]) -> None:
        """Waits until the results of these layers are in place."""

    def done(self, layer: int) -> bool:
        """Whether `wait` would find the layer's exchange over."""
