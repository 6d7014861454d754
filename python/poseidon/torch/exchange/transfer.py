"""How tensors in host memory reach the core: it reads and writes their own memory.

Each layer's exchange is started by one of `dense`, `absent`, `factors`, `rows` and `update`, and ended by `wait`, after
which the result lies in the tensor that was passed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from poseidon import _core
from poseidon.torch.exchange.weight import Weight
from poseidon.torch.model.factors import Factors
from poseidon.torch.tensors.memory import borrowed, flat_view

Rows = tuple[torch.Tensor, torch.Tensor]
"""Ascending indices, of dtype int32, and the values of these rows."""


class Transfer:
    """The calls of the client that a synchronization needs. Buffers are dense, and none may change until `wait`.

    `weight` is this rank's among all. Whoever calls scales what it contributes.
    """

    def __init__(self, client: _core.Client) -> None:
        self._client = client
        self.weight = Weight()

    def dense(self, layer: int, buffer: torch.Tensor, divisor: int, scheme: str, factor_count: int | None) -> None:
        """Contributes `buffer`, which receives the mean. `factor_count`: the rows it would be as factors, if known."""
        self._client.start(layer, borrowed(flat_view(buffer)), divisor, factor_count)

    def absent(self, layer: int, buffer: torch.Tensor, divisor: int, scheme: str, counts: bool = True) -> None:
        """Contributes nothing; `buffer` receives the others' result if there is one.

        `counts`: whether this rank is among those that the mean is over, as it is with an unused parameter.
        """
        self._client.start_absent(layer, borrowed(flat_view(buffer)), divisor, counts)

    def factors(self, layer: int, factors: Factors, buffer: torch.Tensor, divisor: int, scheme: str) -> None:
        """Contributes factors; `buffer` receives the mean."""
        lefts, rights = map(borrowed, factors.lefts), map(borrowed, factors.rights)
        self._client.start_factors(layer, list(lefts), list(rights), borrowed(flat_view(buffer)), divisor)

    def rows(self, layer: int, rows: Rows | None, divisor: int, counts: bool = True) -> None:
        """Contributes rows to a layer that goes by the scheme `rows`, or nothing. `result_rows` has the mean.

        `counts`: as for `absent`.
        """
        if rows is None:
            self._client.start_absent_rows(layer, divisor, counts)
        else:
            self._client.start_rows(layer, borrowed(rows[0]), borrowed(rows[1]), divisor)

    def result_rows(self, layer: int, like: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """After `wait`: copies of the indices (None: all) and values of the rows that some rank had.

        `like`: rows of the same dtype, device and number of columns.
        """
        index_bytes, value_bytes = self._client.result_rows(layer)
        indices = None if index_bytes is None else _copy(index_bytes, torch.int32)
        return indices, _copy(value_bytes, like.dtype).view(-1, like.shape[1])

    def update(self, layer: int, gradient: torch.Tensor, parameter: torch.Tensor, divisor: int) -> None:
        """Contributes `gradient` to a stored layer; `parameter` receives what the servers make of it."""
        self._client.push_pull(layer, borrowed(flat_view(gradient)), borrowed(flat_view(parameter)), divisor)

    def wait(self, layers: Sequence[int]) -> None:
        """Waits until the results of these layers are in place."""
        for layer in layers:
            self._client.wait(layer)

    def done(self, layer: int) -> bool:
        """Whether `wait` would find the layer's exchange over."""
        return self._client.done(layer)


def _copy(raw: NDArray[np.uint8], dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(raw.size // dtype.itemsize, dtype=dtype)
    tensor.view(torch.uint8).numpy()[:] = raw
    return tensor
