"""torch's distributed checkpoints save and load models and optimizers, on workers and servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import SGD, Adam

import poseidon.torch as poseidon
import workers
from torch_cases import all_equal, mean_loss, mlp_batch, own_rows, parameters_digest


def make(seed: int, kind: type, update: str) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = poseidon.DistributedDataParallel(nn.Sequential(nn.Linear(48, 30), nn.Tanh(), nn.Linear(30, 4)), scheme="ps")
    options = {"momentum": 0.9} if kind is SGD else {}
    return model, poseidon.DistributedOptimizer(kind(model.parameters(), lr=0.01, **options), model, update=update)


def steps(model: Any, optimizer: Any, first: int, count: int) -> None:
    for step in range(first, first + count):
        optimizer.zero_grad()
        mean_loss(model, *map(own_rows, mlp_batch(step, 4 * poseidon.world_size()))).backward()
        optimizer.step()
    optimizer.zero_grad()


def saved_and_loaded(folder: str, update: str) -> list[str]:
    digests = []
    for kind in (Adam, SGD):
        path = Path(folder) / kind.__name__
        model, optimizer = make(0, kind, update)
        steps(model, optimizer, 0, 3)
        if poseidon.rank() == 0:  # alone
            parameters, state = get_state_dict(model.module, optimizer)
            dcp.save({"model": parameters, "optimizer": state}, checkpoint_id=path, no_dist=True)
        poseidon.barrier()
        steps(model, optimizer, 3, 2)
        expected = parameters_digest(model)
        for trained in (0, 2):
            other, loading = make(1, kind, update)
            steps(other, loading, 7, trained)
            parameters, state = get_state_dict(other.module, loading)
            dcp.load({"model": parameters, "optimizer": state}, checkpoint_id=path, no_dist=True)
            set_state_dict(other.module, loading, model_state_dict=parameters, optim_state_dict=state)
            steps(other, loading, 3, 2)
            assert parameters_digest(other) == expected, (kind, trained)
        digests.append(expected)
    return digests


@pytest.mark.parametrize("update", ["worker", "server"])
def test_a_checkpoint_is_saved_by_one_rank_and_loaded_by_all(tmp_path: Path, update: str) -> None:
    assert all_equal(workers.run(2, saved_and_loaded, str(tmp_path), update))


def without_values() -> str:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta"))
    with pytest.raises(poseidon.PoseidonError) as caught:
        poseidon.DistributedDataParallel(module)
    return str(caught.value)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_parameter_without_values_is_named(world_size: int) -> None:
    for text in workers.run(world_size, without_values):
        assert "parameter 1.weight is on the meta device and has no values: call module.to_empty" in text
