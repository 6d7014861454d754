"""What programs do with a wrapped module between passes: save, compile; and in other threads."""

from __future__ import annotations

import io
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import poseidon.torch as poseidon
import workers
from overlap_cases import Model, assert_same_training
from torch_cases import all_equal, mlp_batch, own_rows

WIDTH = 300


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4))


class Recomputed(nn.Module):
    """Layers that run again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.net, x, use_reentrant=False)


def adam(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, **options)


def train_step(model: Any, optimizer: Any, step: int = 0, **zeroing: Any) -> None:
    optimizer.zero_grad(**zeroing)
    inputs, targets = map(own_rows, mlp_batch(step, 4 * poseidon.world_size()))
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()


# Saved.


def saved(overlap: bool) -> list[bytes]:
    model = Model(net(), scheme="sfb")
    optimizer: Any = adam(model.parameters())
    if overlap:
        optimizer = poseidon.DistributedOptimizer(optimizer, model)
    files = []
    for step in range(2):
        train_step(model, optimizer, step)
        file = io.BytesIO()
        torch.save(model.module, file)
        assert b"poseidon" not in file.getvalue()
        again = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
        torch.testing.assert_close(again(torch.ones(2, 48)), model.module(torch.ones(2, 48)))
        files.append(file.getvalue())
    return files


@pytest.mark.parametrize("overlap", [False, True])
def test_a_wrapped_module_is_saved_without_poseidon(overlap: bool) -> None:
    assert all_equal(workers.run(2, saved, overlap))


def saved_in_a_pass() -> bytes:
    model = Model(net(), scheme="sfb")
    file = io.BytesIO()
    model.module[1].register_forward_hook(lambda *_: torch.save(model.module[0], file))
    model(torch.ones(2, 48))
    return file.getvalue()


def test_what_is_saved_in_a_forward_pass_needs_no_poseidon() -> None:
    for saved in workers.run(2, saved_in_a_pass):
        assert b"poseidon" not in saved
        again = torch.load(io.BytesIO(saved), weights_only=False)
        torch.testing.assert_close(again(torch.ones(2, 48)), net()[0](torch.ones(2, 48)))


def recomputed() -> list[str]:
    digests = [assert_same_training(few_steps, adam, Recomputed, scheme=scheme) for scheme in ("sfb", "auto")]
    model = Model(Recomputed(), scheme="sfb")
    train_step(model, adam(model.parameters()))
    assert [layer.factor_count for layer in model.synchronization_stats() if "weight" in layer.name] == [8, 8, 8]
    return digests


def few_steps(model: Any, optimizer: Any) -> None:
    for step in range(4):
        train_step(model, optimizer, step)


def test_layers_that_run_again_in_backward_hand_over_factors() -> None:
    assert all_equal(workers.run(2, recomputed))


# Compiled functions over gradients and parameters.


@torch.compile(backend="aot_eager")
def scale(gradients: list[torch.Tensor]) -> None:
    torch._foreach_mul_(gradients, 0.5)


@torch.compile(backend="aot_eager")
def norm_of(module: nn.Module) -> torch.Tensor:
    return torch.stack([param.grad.square().sum() for param in module.parameters() if param.grad is not None]).sum()


@torch.compile(backend="aot_eager")
def average(averages: list[torch.Tensor], params: list[torch.Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_lerp_(averages, params, 0.5)


def compiled_functions(model: Any, optimizer: Any) -> list[float]:
    params = list(model.parameters())
    averages = [param.detach().clone() for param in params]
    norms = []
    for step in range(4):
        optimizer.zero_grad()
        inputs, targets = map(own_rows, mlp_batch(step, 4 * poseidon.world_size()))
        nn.functional.mse_loss(model(inputs), targets).backward()
        if step % 2:
            norms.append(norm_of(model.module).item())
        scale([param.grad for param in params])
        optimizer.step()
        average(averages, params)
    return norms + [one.sum().item() for one in averages]


def compiled() -> str:
    return assert_same_training(compiled_functions, adam, net)


def test_compiled_functions_over_gradients_and_parameters() -> None:
    assert all_equal(workers.run(2, compiled))


# Gradients that are zeroed where they are.


def zeroed(update: str) -> str:
    results = []
    for wrapped in (False, True):
        for options in ({}, {"foreach": True}, {"fused": True}):
            module = net()
            model = Model(module, scheme="ps")
            optimizer: Any = adam(module.parameters(), **options)
            if wrapped:
                optimizer = poseidon.DistributedOptimizer(optimizer, model, update=update)
            for step in range(3):
                train_step(model, optimizer, step, set_to_none=False)
            results.append([param.detach().clone() for param in module.parameters()])
    for found in results[1:]:
        for one, other in zip(found, results[0], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    return str([one.sum().item() for one in results[-1]])


@pytest.mark.parametrize("update", ["worker", "server"])
def test_gradients_are_zeroed_in_place_by_any_kernel(update: str) -> None:
    assert all_equal(workers.run(2, zeroed, update))


# Other threads.


def in_a_thread(function: Any) -> Any:
    found = []

    def call() -> None:
        try:
            found.append(function())
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return found[0]


def saved_by_a_thread() -> str:
    model = Model(net(), scheme="ps")
    optimizer = poseidon.DistributedOptimizer(adam(model.parameters()), model)
    train_step(model, optimizer)
    for reading in (model.state_dict, lambda: model.module[0].weight.sum(), lambda: optimizer.state_dict()):
        refused = in_a_thread(reading)
        assert isinstance(refused, poseidon.PoseidonError)
        assert "call state_dict() in the thread that trains" in str(refused)
    train_step(model, optimizer, 1)
    optimizer.synchronize()
    saved = in_a_thread(lambda: {name: value.clone() for name, value in model.state_dict().items()})
    for step in range(2, 4):  # each in a thread of its own
        assert in_a_thread(lambda step=step: train_step(model, optimizer, step)) is None
    reference = Model(net(), scheme="ps")
    optimizer = adam(reference.parameters())
    for step in range(4):
        train_step(reference, optimizer, step)
        if step == 1:
            assert all(torch.equal(saved[name], value) for name, value in reference.state_dict().items())
    ours = model.state_dict()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)
    return str(sum(value.sum().item() for value in ours.values()))


def test_a_thread_that_saves_while_another_trains() -> None:
    assert all_equal(workers.run(2, saved_by_a_thread))
