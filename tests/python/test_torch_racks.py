"""Workers of machines in racks: what they compute together, and what their plan says of it."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

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


class Changing(nn.Module):
    """A table with sparse gradients, and a layer that only some ranks use in each step, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 48, sparse=True)
        self.body = mlp()
        self.sometimes = nn.Linear(4, 4)

    def forward(self, tokens: torch.Tensor, more: bool) -> torch.Tensor:
        out = self.body(self.table(tokens))
        return self.sometimes(out) if more else out


def rows_of(step: int, size: int) -> list[int]:
    return [1 + (2 * rank + step) % 3 for rank in range(size)]


def uses_more(step: int, rank: int) -> bool:
    """Nobody in step 2; whole machines do not in some steps."""
    return step != 2 and (rank < 2 or (rank + step) % 3 == 0)


def loss_of(model: nn.Module, step: int, rank: int, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(30, (rows,), generator=generator)
    return (model(tokens, uses_more(step, rank)) - torch.randn(rows, 4, generator=generator)).square().mean()


def changing_in_racks(machines: str, racks: str, update: str) -> str:
    """Batches of different sizes, layers without gradients and sparse rows, against one process on all rows."""
    rank = int(os.environ["RANK"])
    poseidon.init(machine=machines[rank], rack=racks[rank] if racks else "", small_bytes=256, chunk_bytes=4096)
    torch.manual_seed(3)
    model, reference = wrap(Changing(), find_unused_parameters=True)
    own: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if update != "none":
        own = poseidon.DistributedOptimizer(own, model, update=update)
    alone = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(5):
        rows = rows_of(step, poseidon.world_size())
        model.set_weight(rows[rank])
        own.zero_grad()
        loss_of(model, step, rank, rows[rank]).backward()
        own.step()
        alone.zero_grad()
        losses = [rows[other] * loss_of(reference, step, other, rows[other]) for other in range(len(rows))]
        (sum(losses[1:], losses[0]) / sum(rows)).backward()
        alone.step()
    if isinstance(own, poseidon.DistributedOptimizer):
        own.synchronize()
    assert_close(model.module, reference)
    answer = parameters_digest(model)
    poseidon.shutdown()
    return answer


@pytest.mark.parametrize(
    ("machines", "racks", "update"),
    [("aabccc", "", "none"), ("aabccc", "xxyxxx", "worker"), ("abbcd", "xyyxz", "none")],
)
def test_weights_rows_and_unused_layers_of_unequal_machines(machines: str, racks: str, update: str) -> None:
    assert all_equal(workers.run_fresh(len(machines), changing_in_racks, machines, racks, update))
