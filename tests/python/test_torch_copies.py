"""Copies of a wrapped model: each computes alone until it is trained, so one rank may evaluate one."""

from __future__ import annotations

import copy
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

import poseidon.torch as poseidon
import workers
from torch_cases import (
    all_equal,
    assert_gradients_close,
    digest,
    mean_loss,
    mlp,
    mlp_batch,
    parameters_digest,
    run_beside_torch,
    shard,
)


def with_statistics() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


def evaluated_alone() -> tuple[float, str]:
    """Rank 0 alone uses copies of several kinds, in every step, without and with gradients."""
    net = with_statistics()
    model = poseidon.DistributedDataParallel(net)
    average = AveragedModel(model)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    poseidon.barrier()
    began = time.monotonic()
    for number in range(3):
        optimizer.zero_grad()
        mean_loss(model, *shard(number)).backward()
        optimizer.step()
        average.update_parameters(model)
        best = copy.deepcopy(model)
        if poseidon.rank() == 0:
            inputs = shard(number)[0]
            with torch.no_grad():
                best(inputs)
                average(inputs)
            best.eval()(inputs)
            best.eval()(inputs)
    return time.monotonic() - began, parameters_digest(model)


def test_one_rank_may_evaluate_a_copy_alone() -> None:
    answers = workers.run(2, evaluated_alone)
    assert all(seconds < 10 for seconds, _ in answers)
    assert all_equal([bits for _, bits in answers])


def trained(training_mode: bool) -> tuple[str, str]:
    """A copy that has evaluated alone on one rank is trained by all: its gradients are means of its own."""
    model = poseidon.DistributedDataParallel(mlp())
    mean_loss(model, *shard(0)).backward()
    twin = copy.deepcopy(model)
    if poseidon.rank() == 1:
        with torch.no_grad():
            twin(shard(0)[0])
    twin.train(training_mode)
    reference = mlp()
    bits = []
    for number in range(1, 4):
        twin.zero_grad()
        reference.zero_grad()
        mean_loss(twin, *shard(number)).backward()
        mean_loss(reference, *mlp_batch(number, 4 * poseidon.world_size())).backward()
        assert_gradients_close(twin.module, reference)
        bits.append(digest(param.grad for param in twin.parameters() if param.grad is not None))
    return "".join(bits), str(len(bits[0]))


def test_a_copy_meets_the_other_ranks_when_it_is_trained_in_either_mode() -> None:
    for training_mode in (True, False):
        assert all_equal(workers.run(2, trained, training_mode))


def in_a_group() -> tuple[bool, int]:
    groups = [dist.new_group([rank]) for rank in range(2)]
    own = groups[poseidon.rank()]
    twin = copy.deepcopy(poseidon.DistributedDataParallel(mlp(), process_group=own))
    mean_loss(twin, *shard(0)).backward()
    return twin.process_group is own, sum(param.grad is not None for param in twin.parameters())


def test_a_copy_in_a_group_stays_in_it(tmp_path: Path) -> None:
    assert run_beside_torch(2, tmp_path / "store", in_a_group) == [(True, 6)] * 2
