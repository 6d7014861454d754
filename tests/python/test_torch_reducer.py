"""Who says by the reducer, or by a flag of torch's class, that a backward pass is to exchange gradients."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import poseidon.torch as poseidon
import workers
from torch_cases import all_equal, assert_close, mean_loss, mlp, mlp_batch, parameters_digest, shard

STEPS = 3
Asking = Callable[[Any, int], None]
"""Makes the gradients of one step, of the model, out of the batches 2 × step and 2 × step + 1."""


def afterwards(model: Any, step: int) -> None:
    """Forward passes without exchange; one of them is to exchange after all."""
    with model.no_sync():
        first, second = (mean_loss(model, *shard(2 * step + part)) for part in range(2))
    first.backward()
    before = model.require_backward_grad_sync, model.require_forward_param_sync
    model.require_backward_grad_sync = model.require_forward_param_sync = True
    model.reducer.prepare_for_backward([])
    second.backward()
    model.require_backward_grad_sync, model.require_forward_param_sync = before


def past_the_wrapper(model: Any, step: int) -> None:
    """The module is called itself, and the reducer told."""
    reducer = model.reducer
    loss = sum(mean_loss(model.module, *shard(2 * step + part)) for part in range(2))
    reducer.prepare_for_backward([loss])
    loss.backward()


def by_the_flag(model: Any, step: int) -> None:
    model.require_backward_grad_sync = False
    mean_loss(model, *shard(2 * step)).backward()
    model.require_backward_grad_sync = True
    mean_loss(model, *shard(2 * step + 1)).backward()


def only_the_last_of_three(model: Any, step: int) -> None:
    """A demand holds for one backward pass: what comes after it in no_sync() stays here."""
    afterwards(model, step)
    own = [param.grad.clone() for param in model.parameters()]
    with model.no_sync():
        mean_loss(model, *shard(step)).backward()
    for param, grad in zip(model.parameters(), own, strict=True):
        assert not torch.equal(param.grad, grad)
        param.grad = grad


def reference() -> torch.nn.Module:
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            mean_loss(module, *mlp_batch(2 * step + part, 4 * poseidon.world_size())).backward()
        optimizer.step()
    return module


def asked(ask: Asking, overlap: bool) -> str:
    model = poseidon.DistributedDataParallel(mlp())
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if overlap:
        optimizer = poseidon.DistributedOptimizer(optimizer, model)
    for step in range(STEPS):
        optimizer.zero_grad()
        ask(model, step)
        optimizer.step()
    assert_close(model.module, reference())
    return parameters_digest(model)


def all_ways(overlap: bool) -> list[str]:
    return [asked(ask, overlap) for ask in (afterwards, past_the_wrapper, by_the_flag, only_the_last_of_three)]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_backward_pass_that_is_to_exchange_does(overlap: bool) -> None:
    assert all_equal(workers.run(2, all_ways, overlap))


def reducer_alone() -> str:
    """The wrapper is dropped, and its reducer goes on to exchange gradients, until it is dropped, too."""
    module = mlp()
    reducer: Any = poseidon.DistributedDataParallel(module).reducer
    gc.collect()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = sum(mean_loss(module, *shard(2 * step + part)) for part in range(2))
        reducer.prepare_for_backward([loss])
        loss.backward()
        optimizer.step()
    assert_close(module, reference())
    result = parameters_digest(module)
    del reducer
    gc.collect()
    mean_loss(module, *shard(poseidon.rank())).backward()  # of nobody's any more
    return result


def test_a_reducer_outlives_its_wrapper() -> None:
    assert all_equal(workers.run(2, reducer_alone))
