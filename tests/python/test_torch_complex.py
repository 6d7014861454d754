"""Complex parameters: exchanged as pairs of real numbers, exact, with what torch's DDP gives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.optim import SGD, Adam, Optimizer

import poseidon.torch as poseidon
import workers
from poseidon.torch.model.gradient_form import form_of
from poseidon.torch.tensors.memory import exchangeable
from test_torch_staged import staged
from torch_cases import all_equal, assert_close, assert_gradients_close, parameters_digest, run_beside_torch

STEPS = 4
DTYPES = [torch.complex64, torch.complex128]
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "momentum": lambda params: SGD(params, lr=0.001, momentum=0.9),
    "adam": lambda params: Adam(params, lr=0.01),
}


class Waves(nn.Module):
    """Complex and real parameters, one of them not contiguous, one whose gradient comes as a conjugate view."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8, dtype=dtype)
        self.turned = nn.Parameter(torch.randn(4, 8, dtype=dtype).t())
        self.gappy = nn.Parameter(torch.randn(4, 8, dtype=dtype)[:, ::2])
        self.phases = nn.Parameter(torch.randn(4, dtype=dtype))
        self.unused = nn.Parameter(torch.randn(3, dtype=dtype))
        self.out = nn.Linear(4, 2, dtype=dtype.to_real())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs) @ self.turned @ self.gappy
        return self.out((hidden * self.phases.conj()).abs())


def inputs_of(rank: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(100 * step + rank), dtype=dtype)


def backward(model: Any, rank: int, step: int, dtype: torch.dtype) -> None:
    """Accumulates two backward passes, of which the second is synchronized."""
    for part in range(2):
        with contextlib.nullcontext() if part else model.no_sync():
            model(inputs_of(rank, 2 * step + part, dtype)).square().mean().backward()


def train_beside_torch(name: str, dtype: torch.dtype) -> str:
    ours, theirs = Waves(dtype), Waves(dtype)
    model = poseidon.DistributedDataParallel(ours)
    reference = TorchDistributedDataParallel(theirs, find_unused_parameters=True)
    optimizers = [OPTIMIZERS[name](part.parameters()) for part in (ours, theirs)]
    tolerance = 1e-5 if dtype == torch.complex64 else 1e-12
    for step in range(STEPS):
        for part in (model, reference):
            part.zero_grad(set_to_none=step % 2 == 0)
            backward(part, poseidon.rank(), step, dtype)
        assert_gradients_close(ours, theirs, tolerance)
        if theirs.phases.grad is not None:  # torch's Adam refuses the conjugate view that torch's DDP leaves
            theirs.phases.grad = theirs.phases.grad.resolve_conj()
        for one in optimizers:
            one.step()
    assert_close(ours, theirs, 1e-4)
    return parameters_digest(ours)


def train_all_beside_torch() -> list[str]:
    return [train_beside_torch(name, dtype) for name in OPTIMIZERS for dtype in DTYPES]


def test_training_equals_torchs(tmp_path: Path) -> None:
    assert all_equal(run_beside_torch(2, tmp_path / "store", train_all_beside_torch))


def train(dtype: torch.dtype, name: str, overlapped: bool) -> str:
    torch.manual_seed(poseidon.rank())
    module = Waves(dtype)
    model = poseidon.DistributedDataParallel(module, scheme="sfb" if name == "adam" else "auto")
    optimizer = OPTIMIZERS[name](module.parameters())
    if overlapped:
        optimizer = poseidon.DistributedOptimizer(optimizer, model, max_norm=100.0 if name == "adam" else None)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(inputs_of(poseidon.rank(), step, dtype)).square().mean().backward()
        optimizer.step()
    return parameters_digest(module)


def compare_optimizers(dtype: torch.dtype, name: str) -> str:
    plain = train(dtype, name, overlapped=False)
    assert train(dtype, name, overlapped=True) == plain
    return plain


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_overlapped_updates_have_the_same_bits(dtype: torch.dtype, name: str) -> None:
    assert all_equal(workers.run(3, compare_optimizers, dtype, name, small_bytes=128))


def test_through_host_memory() -> None:
    assert all_equal(workers.run(2, staged, train, torch.complex64, "momentum", False))


def test_views_that_show_other_values_than_their_memory_are_not_sent_from_it() -> None:
    values = torch.randn(4, dtype=torch.complex64)
    form = form_of(values, sparse=False)
    view = form.view(values)
    assert view is not None
    assert exchangeable(view, form.layout)
    assert form.view(values.conj()) is None
    negative = torch._neg_view(values)
    view = form.view(negative)
    assert view is None or not exchangeable(view, form.layout)
    real = torch._neg_view(torch.randn(4))
    assert not exchangeable(real, form_of(real, sparse=False).layout)


def refused() -> None:
    model = poseidon.DistributedDataParallel(Waves(torch.complex64))
    with pytest.raises(poseidon.PoseidonError, match=r"has dtype torch.complex64; servers update real numbers only"):
        poseidon.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model, update="server")


@pytest.mark.parametrize("world_size", [1, 2])
def test_servers_refuse_them(world_size: int) -> None:
    workers.run(world_size, refused)
