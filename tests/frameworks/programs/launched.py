"""Trains a small model, and saves what each rank has: its place, where that came from, and its parameters.

launched.py FOLDER: started by any launcher.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import poseidon.torch as poseidon
from poseidon.torch.process.context import context

STEPS = 5


def train(folder: str) -> None:
    """Makes some steps, and writes FOLDER/rankR.pt."""
    poseidon.init()
    rank = poseidon.rank()
    torch.manual_seed(rank)  # the others take over rank 0's parameters
    module = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    model = poseidon.DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        inputs = torch.randn(8, 32, generator=torch.Generator().manual_seed(1000 * step + rank))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    settings = context().settings
    state = {
        "source": settings.sources["rank"],
        "world_size": poseidon.world_size(),
        "local_rank": settings.local_rank,
        "local_world_size": settings.local_world_size,
        "model": module.state_dict(),
    }
    torch.save(state, Path(folder, f"rank{rank}.pt"))
    poseidon.shutdown()


if __name__ == "__main__":
    train(sys.argv[1])
