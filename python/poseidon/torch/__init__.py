"""Poseidon for PyTorch.

import poseidon.torch as poseidon

poseidon.init()
model = poseidon.DistributedDataParallel(model)
"""

from poseidon.errors import PoseidonError
from poseidon.torch.context import barrier, broadcast, init, rank, shutdown, world_size
from poseidon.torch.ddp import DistributedDataParallel

__all__ = [
    "DistributedDataParallel",
    "PoseidonError",
    "barrier",
    "broadcast",
    "init",
    "rank",
    "shutdown",
    "world_size",
]
