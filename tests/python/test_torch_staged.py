"""The path of device tensors (host staging, mover thread, products of gathered factors), run on CPU tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import poseidon.torch as poseidon
import poseidon.torch.training.trained_model as trained_model
import workers
from poseidon.torch.exchange.mover import DeviceCopies, StagedTransfer
from test_torch_gradients import Checkpointed, OneLinear, Reused, UsedOutside, gradients_of, unused
from test_torch_gradients import some_rank_uses_the_weight_outside as mixed
from test_torch_training import train, uneven_rows
from torch_cases import EXACT_SCHEMES, all_equal, parameters_digest


class HostCopies(DeviceCopies):
    """Copies between host memory and a "device" that is host memory too: no streams, no events."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
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


def rounded(wire: str) -> tuple[str, float]:
    """The parameters after some steps, and the largest difference from the float32 mean. Layers have one shape, so that
    they take each other's buffers; rank 0 has too many rows for factors in the second step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    wrapped = poseidon.DistributedDataParallel(model, scheme="sfb", wire=wire)
    difference = 0.0
    for step, row_counts in enumerate([(4, 4), (60, 4), (8, 8)]):
        inputs = [
            torch.randn(count, 64, generator=torch.Generator().manual_seed(10 * step + rank))
            for rank, count in enumerate(row_counts)
        ]
        wrapped.zero_grad()
        wrapped(inputs[poseidon.rank()]).square().mean().backward()
        ours = [param.grad.clone() for param in model.parameters() if param.grad is not None]
        alone = copy.deepcopy(model)
        alone.zero_grad()
        for own in inputs:
            (alone(own).square().mean() / len(inputs)).backward()
        for grad, param in zip(ours, alone.parameters(), strict=True):
            assert param.grad is not None
            difference = max(difference, float((grad - param.grad).abs().max() / param.grad.abs().max()))
        with torch.no_grad():
            for param, grad in zip(model.parameters(), ours, strict=True):
                param -= 0.1 * grad
    return parameters_digest(model), difference


@pytest.mark.parametrize("wire", ["bf16", "fp16", "int8"])
def test_rounded_factors_are_those_that_were_sent(wire: str) -> None:
    answers = workers.run(2, staged, rounded, wire)
    assert all_equal([digest for digest, _ in answers])
    assert all(difference < 0.03 for _, difference in answers)


@pytest.mark.parametrize("scheme", ["auto", "ps", "sfb"])
def test_mixed_and_missing_contributions(scheme: str) -> None:
    assert all_equal(workers.run(3, staged, mixed, scheme))
    assert all_equal(workers.run(3, staged, unused, scheme))
    assert all_equal(workers.run(3, staged, uneven_rows, [[3, 1, 5], [0, 4, 2], [60, 1, 0], [1, 1, 1]], scheme))
