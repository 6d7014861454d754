"""Updates on the servers: what a backward pass recomputes sees the parameters as forward saw them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

import poseidon.torch as poseidon
import workers
from test_torch_server_update import assert_same_bits
from torch_cases import all_equal, digest, mean_loss, mlp_batch, own_rows, parameters_digest


class ReadsLater(nn.Module):
    """A checkpointed block scales by the norm of the last layer's weight, which gets no gradient from there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.middle, self.last = nn.Linear(48, 200), nn.Linear(200, 200), nn.Linear(200, 4)
        self.by_name = True
        self.recomputes = True

    def block(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.last.weight if self.by_name else self.kept()
        return torch.tanh(self.first(x)) * (1 + weight.detach().square().sum())

    def kept(self) -> torch.Tensor:
        return list(self.parameters())[4]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.block, x, use_reentrant=False) if self.recomputes else self.first(x)
        return self.last(torch.tanh(self.middle(hidden)))


def train_step(model: Any, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    mean_loss(model, *map(own_rows, mlp_batch(step, 4 * poseidon.world_size()))).backward()
    optimizer.step()


def recomputed(by_name: bool) -> str:
    parts = []
    for server in (True, False):
        module = ReadsLater()
        module.by_name = by_name
        model = poseidon.DistributedDataParallel(module, scheme="ps")
        optimizer: Any = AdamW(module.parameters(), lr=0.01)
        if server:
            optimizer = poseidon.DistributedOptimizer(optimizer, model, update="server")
        for step in range(4):
            train_step(model, optimizer, step)
        parts.append(model)
    assert_same_bits(*parts)
    return parameters_digest(parts[0])


@pytest.mark.parametrize("by_name", [True, False])
def test_a_checkpointed_block_reads_a_later_layer(by_name: bool) -> None:
    assert all_equal(workers.run(2, recomputed, by_name, chunk_bytes=4096))


def only_later() -> tuple[str, bool]:
    """Where the first steps recompute nothing, parameters receive in place; a later reading is no silent mistake."""
    module = ReadsLater()
    module.by_name, module.recomputes = False, False
    model = poseidon.DistributedDataParallel(module, scheme="ps")
    optimizer = poseidon.DistributedOptimizer(SGD(module.parameters(), lr=0.01), model, update="server")
    train_step(model, optimizer, 0)
    in_place = not model.synced_parameters[0].rereads.apart
    train_step(model, optimizer, 1)
    module.recomputes = True
    with pytest.raises(poseidon.PoseidonError) as caught:
        train_step(model, optimizer, 2)
    assert digest([module.last.weight])  # it may be looked at afterwards
    return str(caught.value), in_place


def test_a_first_reading_in_a_later_step_is_an_error() -> None:
    for text, in_place in workers.run(2, only_later):
        assert in_place
        assert "parameter last.weight was read in a backward pass" in text
        assert "pass update='worker'" in text
