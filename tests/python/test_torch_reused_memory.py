"""Programs that write into memory which they have given to a backward pass, or that reach parameters past them.

Each is trained plainly and with updates that wait for their gradients, and compared with one process that does the work
of all ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import poseidon.torch as poseidon
import workers
from overlap_cases import Model, assert_same_training
from poseidon.torch.tensors.pending_gradient import PendingGradient
from poseidon.torch.tensors.watched import Watched, raw_grad
from torch_cases import all_equal, parameters_digest

WIDTH = 1200  # large enough that its exchange is under way when the program goes on
ROWS = 4
STEPS = 4
Program = Callable[[nn.Module, torch.Generator, dict[str, Any]], None]
"""Makes the gradients of one step: given the model, a rank's random numbers, and what the rank keeps between steps."""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8))


def rows(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


# Who writes into rows.


def batch_filled_again(model: nn.Module, generator: torch.Generator, kept: dict[str, Any]) -> None:
    batch = kept.setdefault("batch", torch.empty(ROWS, WIDTH))
    batch.copy_(rows(generator, ROWS, WIDTH))
    model(batch).square().mean().backward()


def batch_of_numpy(model: nn.Module, generator: torch.Generator, kept: dict[str, Any]) -> None:
    array = kept.setdefault("array", np.zeros((ROWS, WIDTH), np.float32))
    array[:] = rows(generator, ROWS, WIDTH).numpy()
    model(torch.from_numpy(array)).square().mean().backward()


def batch_by_its_data(model: nn.Module, generator: torch.Generator, kept: dict[str, Any]) -> None:
    storage = kept.setdefault("rollout", torch.zeros(3 * ROWS, WIDTH))
    part = storage[ROWS : 2 * ROWS]
    part.data.copy_(rows(generator, ROWS, WIDTH))
    model(part).square().mean().backward()
    storage.detach().zero_()


def gradient_of_the_output(model: nn.Module, generator: torch.Generator, kept: dict[str, Any]) -> None:
    output = model(rows(generator, ROWS, WIDTH))
    buffer = kept.setdefault("buffer", torch.empty(ROWS, 8))
    buffer.copy_(rows(generator, ROWS, 8))
    if "second" in kept:
        output.backward(buffer)
    else:
        torch.autograd.backward([output], grad_tensors=[buffer])
    buffer.zero_()
    kept["second"] = True


class Reversible(nn.Module):
    """Overwrites what its second layer was given as soon as backward is past it, in the memory itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        given = hidden.clone()
        output = self.second(given)
        hidden.register_hook(lambda grad: (given.data.fill_(7.0), output.data.zero_(), None)[2])
        output.register_hook(lambda grad: grad.clone())
        return self.last(torch.tanh(output))


class Placed(nn.Module):
    """Autograd makes the gradient of `place` of memory that it reads for other layers later."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.place = nn.Parameter(0.1 * torch.randn(2, ROWS // 2, WIDTH))
        self.joined = nn.Parameter(0.1 * torch.randn(ROWS, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x)) * 2 + self.place.view(ROWS, WIDTH)
        hidden = torch.cat([hidden, self.joined])
        return self.second(hidden) + hidden


def step_of_any(model: nn.Module, generator: torch.Generator, kept: dict[str, Any]) -> None:
    batch_filled_again(model, generator, kept)


PROGRAMS: list[tuple[Callable[[], nn.Module], Program]] = [
    (net, batch_filled_again),
    (net, batch_of_numpy),
    (net, batch_by_its_data),
    (net, gradient_of_the_output),
    (Reversible, step_of_any),
    (Placed, step_of_any),
]


def train(make: Callable[[], nn.Module], program: Program, overlap: bool) -> nn.Module:
    module = make()
    model = Model(module)
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    if overlap:
        optimizer = poseidon.DistributedOptimizer(optimizer, model)
    generator, kept = torch.Generator().manual_seed(poseidon.rank()), {}
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        program(model, generator, kept)
        optimizer.step()
    return module


def reference(make: Callable[[], nn.Module], program: Program) -> nn.Module:
    """One process that does the work of all ranks."""
    module, ranks = make(), range(poseidon.world_size())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    states = [(torch.Generator().manual_seed(rank), dict[str, Any]()) for rank in ranks]
    for _ in range(STEPS):
        sums = [torch.zeros_like(param) for param in module.parameters()]
        for generator, kept in states:
            module.zero_grad()
            program(module, generator, kept)
            for total, param in zip(sums, module.parameters(), strict=True):
                total += param.grad
        for total, param in zip(sums, module.parameters(), strict=True):
            param.grad = total / len(states)
        optimizer.step()
    return module


def reused(index: int) -> list[str]:
    make, program = PROGRAMS[index]
    expected = dict(reference(make, program).named_parameters())
    digests = []
    for overlap in (False, True):
        module = train(make, program, overlap)
        for name, param in module.named_parameters():
            torch.testing.assert_close(param, expected[name], rtol=1e-4, atol=1e-5, msg=f"{name}, overlap {overlap}")
        digests.append(parameters_digest(module))
    return digests


@pytest.mark.parametrize("index", range(len(PROGRAMS)))
def test_rows_that_the_program_writes_into_again(index: int) -> None:
    assert all_equal(workers.run(2, reused, index))


# Who reaches gradients and parameters past them. The same bits as with an optimizer that waits.


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def backward(model: Any, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + poseidon.rank())
    model(rows(generator, ROWS, WIDTH)).square().mean().backward()


def kept_gradients(model: Any, optimizer: Any) -> list[Any]:
    """References, NumPy arrays and views of gradients, from an earlier step, are read and written."""
    seen: list[Any] = []
    backward(model, 0)
    first, second, third = (model.module[index].weight.grad for index in (0, 2, 4))
    array, view, same = torch.Tensor.numpy(first.detach()), second.detach()[1:], [third]
    for step in range(1, STEPS):
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        backward(model, step)
        seen += [float(np.abs(array).sum()), view.sum().item(), same[0].sum().item()]
        array *= 0.5
        view.data.mul_(0.25)
        torch._foreach_mul_(same, 2.0)
    optimizer.step()
    return seen


def flat_gradients(model: Any, optimizer: Any) -> list[Any]:
    params = list(model.parameters())
    flat = torch.zeros(sum(param.numel() for param in params))
    for param, part in zip(params, flat.split([param.numel() for param in params]), strict=True):
        param.grad = part.view_as(param)
    seen = []
    for step in range(STEPS):
        flat.zero_()
        backward(model, step)
        seen.append(flat.norm().item())
        flat.mul_(0.5)
        optimizer.step()
    return seen


def reached_parameters(model: Any, optimizer: Any) -> list[Any]:
    """Through arrays and views from before, a flat tensor, and parameters that were tied after the first step."""
    module = model.module
    array = module[0].weight.detach().numpy()
    flat = torch.cat([module[2].weight.detach().reshape(-1), module[2].bias.detach()])
    module[2].weight.data, module[2].bias.data = flat[:-WIDTH].view(WIDTH, WIDTH), flat[-WIDTH:]
    saved = module[4].state_dict()
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, step)
        if step == 2:
            module[0].bias.data = module[2].bias.data
        optimizer.step()
        seen += [float(array.sum()), flat.sum().item(), saved["weight"].sum().item()]
        flat.mul_(0.99)
    return seen


def reached() -> list[str]:
    return [assert_same_training(loop, momentum, net) for loop in (kept_gradients, flat_gradients, reached_parameters)]


@pytest.mark.filterwarnings("ignore:step. waits for the gradients")
def test_gradients_and_parameters_that_the_program_reaches_past_them() -> None:
    assert all_equal(workers.run(2, reached))


class Usual(nn.Module):
    """Layers whose gradients autograd makes in several ways."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(30, 64)
        self.rows = nn.Embedding(30, 64, sparse=True)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.norm = nn.LayerNorm(64)
        self.recurrent = nn.LSTM(64, 64)
        self.out = nn.Linear(64, 600)
        self.turned = nn.Parameter(0.1 * torch.randn(8, 600))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens) + self.rows(tokens)
        hidden = self.norm(hidden + self.attention(hidden, hidden, hidden)[0])
        return torch.relu(self.out(self.recurrent(hidden)[0])) @ self.turned.t() * self.scale


def usual() -> None:
    """Nobody reaches these past them: no gradient and no update is waited for."""
    for made in (Usual(), copy.deepcopy(Usual())):
        model = Model(made)
        optimizer = poseidon.DistributedOptimizer(momentum(made.parameters()), model)
        for step in range(4):
            optimizer.zero_grad(set_to_none=step < 2)
            model(torch.arange(12).view(1, 12) + poseidon.rank()).square().mean().backward()
            pending = {name: isinstance(raw_grad(param), PendingGradient) for name, param in made.named_parameters()}
            assert all(pending.values()), pending
            optimizer.step()
            watched = {name: isinstance(param, Watched) for name, param in made.named_parameters()}
            assert all(watched.values()), watched


def test_what_nobody_else_reaches_is_not_waited_for() -> None:
    workers.run(2, usual)


def tied_late() -> list[str]:
    """Servers update each parameter on its own, and averages are received into each on its own."""
    module = net()
    model = Model(module, scheme="ps")
    optimizer: Any = poseidon.DistributedOptimizer(momentum(module.parameters()), model, update="server")
    texts = []
    backward(model, 0)
    optimizer.step()
    module[2].weight.data = module[0].weight.data
    with pytest.raises(poseidon.PoseidonError) as caught:
        backward(model, 1)
    texts.append(str(caught.value))
    module = net()
    local = poseidon.LocalSGD(module, momentum(module.parameters()), 1)
    module[2].bias.data = module[0].bias.data
    module(torch.ones(ROWS, WIDTH)).sum().backward()
    with pytest.raises(poseidon.PoseidonError) as caught:
        local.step()
    texts.append(str(caught.value))
    module = net()
    model = Model(module)
    module[4].bias.data = module[4].bias.data[:5]
    with pytest.raises(poseidon.PoseidonError) as caught:
        backward(model, 0)
    return [*texts, str(caught.value)]


def test_parameters_that_are_tied_or_resized_too_late_are_named() -> None:
    for server, averaged, resized in workers.run(2, tied_late):
        assert "parameters 0.weight and 2.weight share memory since the DistributedOptimizer was made" in server
        assert "parameters 0.bias and 2.bias share memory" in averaged
        assert "parameter 4.bias has become float32 (5,) on cpu, and was float32 (8,) on cpu" in resized
