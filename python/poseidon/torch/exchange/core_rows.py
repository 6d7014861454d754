"""Rows of a gradient in host memory, to and from the core."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from poseidon.torch.exchange.transfer import Rows
from poseidon.torch.tensors.memory import borrowed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from poseidon import _core


def start_rows(client: _core.Client, layer: int, rows: Rows | None, divisor: int, counts: bool) -> None:
    """Starts the exchange of rows, or takes part in it with nothing."""
    if rows is None:
        client.start_absent_rows(layer, divisor, counts)
    else:
        client.start_rows(layer, borrowed(rows[0]), borrowed(rows[1]), divisor)


def read_rows(client: _core.Client, layer: int, like: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
    """A copy of the result, in host memory; see `Transfer.result_rows`."""
    index_bytes, value_bytes = client.result_rows(layer)
    indices = None if index_bytes is None else _copy(index_bytes, torch.int32)
    return indices, _copy(value_bytes, like.dtype).view(-1, like.shape[1])


def _copy(raw: NDArray[np.uint8], dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(raw.size // dtype.itemsize, dtype=dtype)
    tensor.view(torch.uint8).numpy()[:] = raw
    return tensor
