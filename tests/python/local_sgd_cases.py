"""Trainings by LocalSGD, and the same by emulations in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import poseidon.torch as poseidon
from test_torch_wire import rounded
from torch_cases import mlp, parameters_digest

torch.set_num_threads(1)  # as the workers do: on some processors the bits of a product depend on it

RANKS = 3
STEPS = 9
OUTER = poseidon.OuterNesterov(lr=0.7, momentum=0.9)

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def momentum_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Another one for every rank and step."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(6, 48, generator=generator).to(dtype), torch.randn(6, 4, generator=generator).to(dtype)


def backward(model: nn.Module, rank: int, step: int) -> None:
    dtype = next(model.parameters()).dtype
    inputs, targets = batch(rank, step, dtype)
    nn.functional.mse_loss(model(inputs).float(), targets.float()).backward()


def mean(tensors: list[torch.Tensor]) -> torch.Tensor:
    """In rank order, in float32 where they have fewer bits, divided once."""
    wide = [tensor.double() if tensor.dtype == torch.float64 else tensor.float() for tensor in tensors]
    total = wide[0].clone()
    for tensor in wide[1:]:
        total += tensor
    return total / len(tensors)


def replicas_equal(model: nn.Module) -> bool:
    """Collective."""
    return len(set(poseidon.all_gather(int(parameters_digest(model)[:15], 16)))) == 1


class Emulation:
    """All ranks' models in one process, one after the other."""

    def __init__(self, make: MakeOptimizer, model: nn.Module, ranks: int = RANKS) -> None:
        self.models = [copy.deepcopy(model) for _ in range(ranks)]
        self.optimizers = [make(one) for one in self.models]

    def step(self, step: int) -> None:
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            optimizer.zero_grad()
            backward(model, rank, step)
            optimizer.step()

    @torch.no_grad()
    def average(self) -> None:
        for params in zip(*(model.parameters() for model in self.models), strict=True):
            value = mean([param.detach() for param in params])
            for param in params:
                param.copy_(value)


class OuterEmulation(Emulation):
    """The same with torch's SGD on the mean pseudo-gradient, which is rounded as on the wire."""

    def __init__(self, make: MakeOptimizer, model: nn.Module, outer: poseidon.OuterNesterov, wire: str) -> None:
        super().__init__(make, model)
        self._wire = wire
        self.held = [nn.Parameter(param.detach().clone()) for param in model.parameters()]
        nesterov = outer.momentum > 0
        self.outer = torch.optim.SGD(self.held, lr=outer.lr, momentum=outer.momentum, nesterov=nesterov)

    def average(self) -> None:
        with torch.no_grad():
            for held, *params in zip(self.held, *(model.parameters() for model in self.models), strict=True):
                held.grad = mean([rounded(held - param, self._wire) for param in params])
        self.outer.step()
        with torch.no_grad():
            for held, *params in zip(self.held, *(model.parameters() for model in self.models), strict=True):
                for param in params:
                    param.copy_(held)


def train(make: MakeOptimizer, every: int, dtype: torch.dtype = torch.float32, **options: Any) -> list[str]:
    """This rank's digest of the parameters after every step."""
    model = mlp(dtype)
    if poseidon.rank():  # which all take from rank 0
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
    optimizer = poseidon.LocalSGD(model, make(model), every, **options)
    digests = []
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, poseidon.rank(), step)
        optimizer.step()
        digests.append(parameters_digest(model))
    assert optimizer.step_count == STEPS
    assert optimizer.averaging_count == STEPS // every
    return digests


def expected(emulation: Emulation, every: int) -> list[list[str]]:
    digests: list[list[str]] = [[] for _ in emulation.models]
    for step in range(STEPS):
        emulation.step(step)
        if (step + 1) % every == 0:
            emulation.average()
        for own, model in zip(digests, emulation.models, strict=True):
            own.append(parameters_digest(model))
    return digests


def train_with(every: int, options: dict[str, Any]) -> list[str]:
    return train(adamw, every, **options)
