"""Workers of machines in racks: what they compute together, and what their plan says of it."""

from __future__ import annotations

import os

import pytest
import torch

import poseidon.torch as poseidon
import workers
from torch_cases import all_equal, assert_close, mean_loss, mlp, mlp_batch, parameters_digest, shard, wrap


def in_racks(machines: str, racks: str, wire: str, overlap: bool) -> tuple[str, str]:
    """Three steps against one process. Returns the parameters' digest, and the plan."""
    rank = int(os.environ["RANK"])
    poseidon.init(machine=machines[rank], rack=racks[rank], small_bytes=256, chunk_bytes=4096)
    model, reference = wrap(mlp(), wire=wire)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = poseidon.DistributedOptimizer(optimizer, model) if overlap else optimizer
    alone = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        own.zero_grad()
        mean_loss(model, *shard(step)).backward()
        own.step()
        alone.zero_grad()
        mean_loss(reference, *mlp_batch(step, 4 * poseidon.world_size())).backward()
        alone.step()
    if wire == "fp32":
        assert_close(model.module, reference)
    answer = parameters_digest(model), str(model.plan())
    poseidon.shutdown()
    return answer


@pytest.mark.parametrize(("wire", "overlap"), [("fp32", False), ("fp32", True), ("bf16", False), ("int8", False)])
def test_machines_of_two_workers_in_two_racks(wire: str, overlap: bool) -> None:
    answers = workers.run_fresh(6, in_racks, "aabbcc", "xxxxyy", wire, overlap)
    assert all_equal([digest for digest, _ in answers])
    for _, plan in answers:
        assert "adds up: rack 0: machine 0 (ranks 0, 1), machine 1 (ranks 2, 3)\n" in plan + "\n"
        assert "adds up: rack 1: machine 2 (ranks 4, 5)" in plan


def test_machines_without_racks_are_told_too() -> None:
    for _, plan in workers.run_fresh(3, in_racks, "aab", ["", "", ""], "fp32", False):
        assert plan.endswith("adds up: machine 0 (ranks 0, 1)\nadds up: machine 1 (ranks 2)")
