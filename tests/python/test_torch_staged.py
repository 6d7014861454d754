"""The path of device tensors (host staging, mover thread, products of gathered factors), run on CPU tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import poseidon.torch.training.trained_model as trained_model
import workers
from poseidon.torch.exchange.mover import StagedTransfer
from test_torch_gradients import Checkpointed, OneLinear, Reused, UsedOutside, gradients_of, unused
from test_torch_gradients import some_rank_uses_the_weight_outside as mixed
from test_torch_training import train, uneven_rows
from torch_cases import EXACT_SCHEMES, all_equal


class HostCopies:
    """Copies between host memory and a "device" that is host memory too: no streams, no events."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.copied_bytes = 0

    def host_buffer(self, element_count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(element_count, dtype=dtype)

    def to_host(self, source: torch.Tensor, host: torch.Tensor) -> Callable[[], None]:
        flat = source.detach().as_strided((source.numel(),), (1,))

        def copied() -> None:  # as late as a device would: in the mover thread
            host.copy_(flat)
            self.copied_bytes += host.nbytes

        return copied

    def to_device(self, host: torch.Tensor, destination: torch.Tensor) -> None:
        destination.as_strided((destination.numel(),), (1,)).copy_(host)

    def run(self, function: Callable[[], None]) -> None:
        function()

    def join(self) -> None:
        pass


def staged(function: Callable[..., Any], *args: Any) -> Any:
    """Runs `function` with every model's exchange staged."""
    copies: list[HostCopies] = []

    def make(client: Any, device: torch.device) -> StagedTransfer:
        copies.append(HostCopies())
        return StagedTransfer(client, copies[-1])

    with mock.patch.object(trained_model, "make_transfer", make):
        result = function(*args)
    assert sum(one.copied_bytes for one in copies) > 0
    return result


@pytest.mark.parametrize("scheme", EXACT_SCHEMES)
@pytest.mark.parametrize("kind", [OneLinear, Reused, UsedOutside, Checkpointed])
def test_gradients(kind: type[torch.nn.Module], scheme: str) -> None:
    assert all_equal(workers.run(2, staged, gradients_of, kind, scheme))


@pytest.mark.parametrize("scheme", EXACT_SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training(dtype: torch.dtype, scheme: str) -> None:
    assert all_equal(workers.run(2, staged, train, scheme, dtype, "sgd", 3, True, 6))


@pytest.mark.parametrize("scheme", ["auto", "ps", "sfb"])
def test_mixed_and_missing_contributions(scheme: str) -> None:
    assert all_equal(workers.run(3, staged, mixed, scheme))
    assert all_equal(workers.run(3, staged, unused, scheme))
    assert all_equal(workers.run(3, staged, uneven_rows, [[3, 1, 5], [0, 4, 2], [60, 1, 0], [1, 1, 1]], scheme))
