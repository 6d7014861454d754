"""A small transformer, sharded or not: what one process trains, and what ranks train together."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import poseidon.torch  # registers the backend
import workers

STEPS = 4
ROWS = 8
VOCABULARY = 51  # shards of 26 and 25 rows
MACHINES = ("replicate", "shard")
_names = itertools.count()

Scene = Callable[..., list[torch.Tensor]]
"""Called with the rank, the number of ranks and the backend of torch.distributed."""


class Block(nn.Module):
    """A small transformer's block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def network() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Embedding(VOCABULARY, 16), Block(16), Block(16), nn.Linear(16, VOCABULARY))


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (ROWS, 6), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def momentum_sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, part: int, parts: int, optimizer: Any = None, halves: int = 1, clear: bool = True) -> None:
    """Trains on this part of each batch, in so many backward passes a step."""
    optimizer = optimizer or momentum_sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=clear)
        for some in batch(step).chunk(parts)[part].chunk(halves):
            (loss_of(model, some) / halves).backward()
        optimizer.step()


def alone() -> list[torch.Tensor]:
    """The parameters that one process trains."""
    model = network()
    train(model, 0, 1)
    return [parameter.detach() for parameter in model.parameters()]


def mesh_of(*names: str, **options: Any) -> Any:
    """Four ranks, as two times two."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names, **options)


def sharded(mesh: Any, **options: Any) -> Any:
    """The network over this mesh, each block a group of FSDP's."""
    from torch.distributed.fsdp import fully_shard

    model = network()
    for block in model[1:3]:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def made(machines: int, overlaps: bool) -> tuple[Any, nn.Module, Any]:
    """The model over so many machines, what is trained, and its optimizer."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (machines, 4 // machines), mesh_dim_names=MACHINES)
    model = sharded(mesh["shard"])
    optimizer = momentum_sgd(model)
    if not overlaps:
        return model, poseidon.torch.replicate(model, mesh["replicate"]), optimizer
    wrapper = poseidon.torch.DistributedDataParallel(model, device_mesh=mesh["replicate"])
    return model, wrapper, poseidon.torch.DistributedOptimizer(optimizer, wrapper)


def tensor_parallel(mesh: Any, model: nn.Sequential | None = None) -> nn.Sequential:
    """The network with two of each block's layers cut, one by columns and one by rows."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = model or network()
    for block in model[1:3]:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def shift(model: nn.Module, by: float = 1.0) -> None:
    """Makes this rank's parameters others."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by)


def whole(model: nn.Module) -> list[torch.Tensor]:
    """All elements of all parameters. Collective."""
    return [
        (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().clone()
        for parameter in model.parameters()
    ]


def run(
    team: workers.Team, scene: Scene, folder: Path, backend: str = "gloo", **named: Any
) -> list[list[torch.Tensor]]:
    """What the scene returns on each of four ranks. It is given `named`, too."""
    meeting = str(folder / f"meeting-{next(_names)}")
    answers = team.ask(4, 60.0 * workers.SLOWED, _inside, scene, meeting, 4, backend, named)
    for answer in answers:
        assert isinstance(answer, list), getattr(answer, "trace", answer)
    return [[torch.from_numpy(array) for array in answer] for answer in answers]


def _inside(rank: int, scene: Scene, meeting: str, size: int, backend: str, named: dict[str, Any]) -> Any:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}  # as torchrun says
    os.environ.update({name: str(value) for name, value in place.items()})
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=size)
    try:
        answer = scene(rank, size, backend, **named)
        dist.barrier()
        return [tensor.numpy() for tensor in answer]
    finally:
        poseidon.torch.shutdown()
        dist.destroy_process_group()
        for name in place:
            del os.environ[name]


def check_same(answers: Iterable[list[torch.Tensor]], expected: list[torch.Tensor], **within: float) -> None:
    """All ranks have these parameters up to rounding, and the same bits."""
    within = within or {"rtol": 1e-4, "atol": 1e-5}
    first: list[torch.Tensor] | None = None
    for answer in answers:
        first = first or answer
        for mine, theirs, bits in zip(answer, expected, first, strict=True):
            torch.testing.assert_close(mine, theirs, **within)
            assert torch.equal(mine, bits), "replicas differ"
