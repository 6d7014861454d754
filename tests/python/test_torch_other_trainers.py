"""A model some of whose parameters somebody else trains, or did until the program dropped it: alike on all ranks."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import poseidon.torch as poseidon
import workers
from poseidon.errors import InvalidArgument
from torch_cases import all_equal, mlp, parameters_digest

pytest.importorskip("poseidon._core", reason="the compiled core is not built")
UPDATES = ["plain", "worker", "server"]


class Run:
    """What a program may keep of a training: itself, so that only Python's garbage collector finds it."""

    def __init__(self, module: nn.Module, update: str) -> None:
        self.run = self
        self.model = poseidon.DistributedDataParallel(module)
        inner = SGD(module.parameters(), lr=0.1)
        self.optimizer: Any = inner
        if update != "plain":
            self.optimizer = poseidon.DistributedOptimizer(inner, self.model, update=update)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 48)).square().mean().backward()
        self.optimizer.step()


def two_models() -> tuple[nn.Module, nn.Module]:
    encoder = nn.Linear(48, 64)
    return nn.Sequential(encoder, nn.Linear(64, 4)), nn.Sequential(encoder, nn.Tanh(), nn.Linear(64, 4))


def after_dropped(update: str) -> str:
    """The parameters of a model after another one, collected on rank 1 alone so far, has had some of them."""
    first, second = two_models()
    gc.disable()
    Run(first, update).step()
    if poseidon.rank() == 1:
        gc.collect()
    later = Run(second, "worker")
    gc.enable()
    later.step()
    later.optimizer.synchronize()
    return parameters_digest(second)


@pytest.mark.parametrize("update", UPDATES)
def test_what_the_program_has_dropped_trains_nothing_on_any_rank(update: str) -> None:
    assert all_equal(workers.run(2, after_dropped, update))


def refusal(make: Any) -> str:
    with pytest.raises(InvalidArgument) as found:
        make()
    return str(found.value)


def kept_on_one_rank(update: str) -> str:
    first, second = two_models()
    kept = [Run(first, update)]
    kept[0].step()
    if poseidon.rank() == 1:
        kept.clear()
    return refusal(lambda: poseidon.DistributedDataParallel(second))


@pytest.mark.parametrize("update", UPDATES[1:])
def test_what_one_rank_keeps_is_refused_on_all(update: str) -> None:
    texts = workers.run(2, kept_on_one_rank, update)
    assert all_equal(texts)
    assert "is in another wrapped model already" in texts[0]


def averaged(keeps: str) -> str:
    """The refusal of a wrapper where LocalSGD has had the module; empty if there is none."""
    module = mlp()
    kept = [poseidon.LocalSGD(module, SGD(module.parameters(), lr=0.1), every=1)]
    module(torch.ones(2, 48)).sum().backward()
    kept[0].step()
    if not (keeps == "all" or (keeps == "rank 0" and poseidon.rank() == 0)):
        kept.clear()
    whole = nn.Sequential(module, nn.Linear(4, 2))
    if keeps:
        return refusal(lambda: poseidon.DistributedDataParallel(whole))
    Run(whole, "worker").step()
    return ""


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("keeps", ["", "rank 0", "all"])
def test_a_model_is_not_wrapped_while_local_sgd_averages_a_part_of_it(keeps: str, size: int) -> None:
    texts = workers.run(size, averaged, keeps)
    assert all_equal(texts)
    assert texts[0].startswith("DistributedDataParallel and LocalSGD exclude each other" if keeps else "")
