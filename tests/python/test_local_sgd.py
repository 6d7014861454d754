"""LocalSGD: the bits of an emulation in one process, and replicas that are equal after every averaging."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poseidon.torch as poseidon
import workers
from local_sgd_cases import (
    OUTER,
    RANKS,
    STEPS,
    Emulation,
    MakeOptimizer,
    OuterEmulation,
    adamw,
    backward,
    expected,
    momentum_sgd,
    replicas_equal,
    train,
    train_with,
)
from poseidon.errors import InvalidArgument
from torch_cases import digest, mlp


@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize("make", [adamw, momentum_sgd])
def test_the_mean_of_parameters_has_the_bits_of_an_emulation(make: MakeOptimizer, every: int) -> None:
    wanted = expected(Emulation(make, mlp()), every)
    assert workers.run(RANKS, train, make, every) == wanted
    for step in range(STEPS):
        assert ((step + 1) % every == 0) == (len({own[step] for own in wanted}) == 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_rounded_once(dtype: torch.dtype) -> None:
    wanted = expected(Emulation(momentum_sgd, mlp(dtype)), 3)
    assert workers.run(RANKS, train, momentum_sgd, 3, dtype) == wanted


@pytest.mark.parametrize("outer", [OUTER, poseidon.OuterNesterov(1.0, 0.0)])
@pytest.mark.parametrize("every", [1, 3])
def test_the_outer_optimizer_is_that_of_torch(every: int, outer: poseidon.OuterNesterov) -> None:
    wanted = expected(OuterEmulation(adamw, mlp(), outer, "fp32"), every)
    assert workers.run(RANKS, train_with, every, {"outer": outer}) == wanted


@pytest.mark.parametrize("outer", [OUTER, None])
@pytest.mark.parametrize("wire", ["bf16", "fp16", "int8"])
def test_pseudo_gradients_are_rounded_once(wire: str, outer: poseidon.OuterNesterov | None) -> None:
    wanted = expected(OuterEmulation(adamw, mlp(), outer or poseidon.OuterNesterov(1.0, 0.0), wire), 4)
    assert workers.run(RANKS, train_with, 4, {"outer": outer, "wire": wire}) == wanted


def test_parameters_come_back_in_bf16() -> None:
    answers = workers.run(RANKS, train_with, 3, {}, parameter_wire="bf16")
    for step in (2, 5, 8):
        assert len({answer[step] for answer in answers}) == 1
    assert answers[0] != expected(Emulation(adamw, mlp()), 3)[0]


def test_one_worker_has_the_outer_optimizer_too() -> None:
    emulation = OuterEmulation(adamw, mlp(), OUTER, "fp32")
    del emulation.models[1:], emulation.optimizers[1:]
    assert workers.run(1, train_with, 3, {"outer": OUTER}) == expected(emulation, 3)
    assert workers.run(1, train_with, 3, {}) == expected(Emulation(adamw, mlp(), ranks=1), 3)


# What a model may have.


class Odd(nn.Module):
    """Tied, frozen, unused, sparse, strided and complex parameters, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(11, 6, sparse=True)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = nn.Parameter(torch.randn(6, 11).t())  # not contiguous
        self.tied = self.head.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = nn.Parameter(torch.full((2,), float(poseidon.rank())))
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.empty(0))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.head(self.norm(self.words(words))).square().mean() + self.phase.abs().sum()
        return value + self.tied.sum() * 0.01


def odd_training() -> tuple[list[str], str, bool]:
    model = Odd()
    optimizer = poseidon.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.05), 2)
    digests = []
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * poseidon.rank() + step)
        optimizer.zero_grad()
        model(torch.randint(11, (8,), generator=generator)).backward()
        optimizer.step()
        digests.append(digest([*(p.detach() for p in model.parameters()), *model.buffers()]))
    return digests, str(model.unused.tolist()), not model.head.weight.is_contiguous()


def test_odd_parameters_and_buffers() -> None:
    answers = workers.run(RANKS, odd_training)
    for step in range(4):
        assert len({answer[0][step] for answer in answers}) == (1 if step % 2 else RANKS)
    assert {answer[1:] for answer in answers} == {("[0.0, 0.0]", True)}


def groups_added() -> bool:
    model = mlp()
    first, *rest = model.parameters()
    optimizer = poseidon.LocalSGD(model, torch.optim.SGD([first], lr=0.1), 2)
    optimizer.add_param_group({"params": rest, "lr": 0.01})
    for step in range(2):
        optimizer.zero_grad()
        model.zero_grad()
        backward(model, poseidon.rank(), step)
        optimizer.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.01]
    with pytest.raises(InvalidArgument, match="not the model's"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert len(optimizer.param_groups) == 2
    return replicas_equal(model)


def test_groups_are_added_later() -> None:
    assert all(workers.run(RANKS, groups_added))
