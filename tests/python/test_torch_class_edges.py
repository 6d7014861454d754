"""What could train wrong without a word at the edges of torch's class: groups of hooks, rows that forward changes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

import poseidon.torch as poseidon
from poseidon.errors import InvalidArgument
from test_torch_class import Wrapper, in_a_world
from torch_cases import digest, mlp


def all_reduce_of_a_part() -> str:
    """allreduce_hook with a group of fewer ranks averages over these, as with torch's class."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]

    def hooked(wrapper: Wrapper) -> nn.Module:
        model = wrapper(mlp())
        model.register_comm_hook(alone, default_hooks.allreduce_hook)
        F.mse_loss(model(torch.ones(2, 48) + dist.get_rank()), torch.zeros(2, 4)).backward()
        return model

    ours, theirs = hooked(poseidon.DistributedDataParallel), hooked(TorchDistributedDataParallel)
    for own, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert own.grad is not None
        assert wanted.grad is not None
        torch.testing.assert_close(own.grad, wanted.grad)
    return digest(param.grad for param in ours.parameters() if param.grad is not None)


def test_all_reduce_hook_of_another_group() -> None:
    first, second = in_a_world(2, all_reduce_of_a_part)
    assert first != second


def hook_lost_with_the_group() -> str:
    model = poseidon.DistributedDataParallel(mlp())
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    with pytest.raises(InvalidArgument) as error:
        model._update_process_group(dist.group.WORLD)
    return str(error.value)


def test_another_group_would_lose_the_hook() -> None:
    for text in in_a_world(2, hook_lost_with_the_group):
        assert "its communication hook would be lost" in text


def with_max_norm() -> str:
    with pytest.warns(UserWarning, match="max_norm") as caught:
        poseidon.DistributedDataParallel(nn.Sequential(nn.Embedding(9, 4, max_norm=1.0)))
    return str(caught[0].message)


def test_rows_that_forward_changes_are_told() -> None:
    for text in in_a_world(2, with_max_norm):
        assert text.startswith("0 has max_norm")
