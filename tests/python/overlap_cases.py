"""What the tests of updates that wait for their gradients share: the same training with and without them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import poseidon.torch as poseidon
from torch_cases import digest, mean_loss, mlp, mlp_batch, own_rows, parameters_digest

Make = Callable[[Any], Optimizer]
Model = poseidon.DistributedDataParallel


class Branches(nn.Module):
    """Layers in another order than they are registered, tied, used twice, now and then, frozen, never; a bare
    parameter; one used by a module that does not own it; odd memory layouts; normalization with buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.out = nn.Linear(40, 4)
        self.turned = nn.Parameter(0.1 * torch.randn(4, 40).t())  # not contiguous
        self.gappy = nn.Parameter((0.2 * torch.randn(4, 8))[:, ::2])  # not dense
        self.never = nn.Linear(3, 3)
        self.sometimes = nn.Linear(40, 40)
        self.frozen = nn.Linear(40, 40).requires_grad_(False)
        self.norm = nn.BatchNorm1d(40)
        self.tied = nn.Linear(48, 40)
        self.twice = nn.Linear(40, 40)
        self.borrowed = nn.Linear(40, 40)
        self.first = nn.Linear(48, 40)
        self.tied.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(torch.tanh(self.first(x) + self.tied(x)))
        hidden = self.twice(torch.tanh(self.twice(hidden)))
        hidden = torch.tanh(hidden @ self.borrowed.weight + self.borrowed.bias)
        if x[0, 0] > 0:
            hidden = hidden + torch.tanh(self.sometimes(hidden))
        return (self.out(self.frozen(hidden)) + hidden @ self.turned) @ self.gappy


def own_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`sometimes` is used by all ranks, by rank 0 alone, by none, by turns."""
    inputs, targets = mlp_batch(step, 4 * poseidon.world_size())
    inputs, targets = own_rows(inputs).clone(), own_rows(targets)
    inputs[0, 0] = 1.0 if step % 3 == 0 or (step % 3 == 1 and poseidon.rank() == 0) else -1.0
    return inputs, targets


def wrapped(overlap: bool, make: Make, module: nn.Module | None = None, scheme: str = "auto", **options: Any) -> Any:
    """A model and its optimizer; with `overlap` the optimizer updates when gradients arrive."""
    model = Model(mlp() if module is None else module, scheme=scheme)
    optimizer = make(model.parameters())
    return model, poseidon.DistributedOptimizer(optimizer, model, **options) if overlap else optimizer


Loop = Callable[[Model, Any], Any]
"""Trains a model with an optimizer and returns what is to be equal beside the parameters, e.g. losses."""


def assert_same_training(loop: Loop, make: Make, module: Callable[[], nn.Module] = mlp, **options: Any) -> str:
    """`loop` gives the same bits with updates that wait for gradients as without. Returns the parameters' digest."""
    scheme = options.pop("scheme", "auto")
    results = []
    for overlap in (True, False):
        torch.manual_seed(11)
        model, optimizer = wrapped(overlap, make, module(), scheme, **(options if overlap else {}))
        seen = loop(model, optimizer)
        states = optimizer.state_dict()["state"]
        tensors = {
            **{f"parameter {name}": param for name, param in model.named_parameters()},
            **{f"gradient of {name}": param.grad for name, param in model.named_parameters()},
            **{f"buffer {name}": buffer for name, buffer in model.named_buffers()},
            **{f"state {key} {name}": value for key, state in states.items() for name, value in state.items()},
        }
        results.append((copy.deepcopy(seen), {name: fingerprint(value) for name, value in tensors.items()}))
    (seen, ours), (expected, theirs) = results
    assert set(ours) == set(theirs)
    different = [name for name in ours if ours[name] != theirs[name]]
    assert not different, f"not the same bits: {', '.join(different)}"
    assert seen == expected
    return parameters_digest(model)


def fingerprint(value: Any) -> Any:
    """Equal iff all bits, dtype and memory layout are."""
    if not isinstance(value, torch.Tensor):
        return value
    return digest([value]), value.dtype, value.stride()


def train_step(model: Model, optimizer: Any, step: int) -> float:
    inputs, targets = own_batch(step)
    optimizer.zero_grad()
    loss = mean_loss(model, inputs, targets)
    loss.backward()
    optimizer.step()
    return loss.item()


def plain_loop(model: Model, optimizer: Any, steps: int = 6) -> list[float]:
    return [train_step(model, optimizer, step) for step in range(steps)]
