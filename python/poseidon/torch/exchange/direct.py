"""Exchange of tensors in host memory, and the choice between that and staging."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from poseidon import _core
from poseidon.torch.exchange.core_rows import read_rows, start_rows
from poseidon.torch.exchange.mover import CudaCopies, StagedTransfer
from poseidon.torch.exchange.transfer import Rows, Transfer
from poseidon.torch.model.factors import Factors
from poseidon.torch.tensors.memory import borrowed, flat_view


class DirectTransfer(Transfer):
    """CPU tensors: the core reads and writes their own memory."""

    def __init__(self, client: _core.Client) -> None:
        self._client = client

    def dense(self, layer: int, buffer: torch.Tensor, divisor: int, scheme: str, factor_count: int | None) -> None:
        self._client.start(layer, borrowed(flat_view(buffer)), divisor, factor_count)

    def absent(self, layer: int, buffer: torch.Tensor, divisor: int, scheme: str, counts: bool = True) -> None:
        self._client.start_absent(layer, borrowed(flat_view(buffer)), divisor, counts)

    def factors(self, layer: int, factors: Factors, buffer: torch.Tensor, divisor: int, scheme: str) -> None:
        lefts, rights = map(borrowed, factors.lefts), map(borrowed, factors.rights)
        self._client.start_factors(layer, list(lefts), list(rights), borrowed(flat_view(buffer)), divisor, False)

    def rows(self, layer: int, rows: Rows | None, divisor: int, counts: bool = True) -> None:
        start_rows(self._client, layer, rows, divisor, counts)

    def result_rows(self, layer: int, like: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        return read_rows(self._client, layer, like)

    def update(self, layer: int, gradient: torch.Tensor, parameter: torch.Tensor, divisor: int) -> None:
        self._client.push_pull(layer, borrowed(flat_view(gradient)), borrowed(flat_view(parameter)), divisor)

    def wait(self, layers: Sequence[int]) -> None:
        for layer in layers:
            self._client.wait(layer)

    def done(self, layer: int) -> bool:
        return self._client.done(layer)


def make_transfer(client: _core.Client, device: torch.device) -> Transfer:
    """The transfer for parameters on `device`."""
    if device.type == "cpu":
        return DirectTransfer(client)
    return StagedTransfer(client, CudaCopies(device))
