"""Sharded and tensor-parallel models over the backend `poseidon`: parameters as in one process, replicas the same."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import poseidon.torch  # registers the backend
import workers
from poseidon.torch.backend.hsdp import exchange_replicas

pytest.importorskip("poseidon._core", reason="the compiled core is not built")
pytest.importorskip("torch.distributed.fsdp", reason="this torch has no fully_shard")

TEAM = workers.Team(4)
STEPS = 4
ROWS = 8
OUTER = {"lr": 0.7, "momentum": 0.9}
_names = itertools.count()


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
    return nn.Sequential(nn.Embedding(50, 16), Block(16), Block(16), nn.Linear(16, 50))


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, 50, (ROWS, 6), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def alone() -> list[torch.Tensor]:
    """The parameters that one process trains."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def train(model: nn.Module, part: int, parts: int) -> None:
    """Trains on this part of each batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(step).chunk(parts)[part]).backward()
        optimizer.step()


def whole(model: nn.Module) -> list[torch.Tensor]:
    """All elements of all parameters. Collective."""
    return [
        (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().clone()
        for parameter in model.parameters()
    ]


def shard_and_replicate(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    override = {"backend_override": {"replicate": "poseidon"}} if backend == "gloo" else {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"), **override)
    assert dist.get_backend(mesh["replicate"].get_group()) == "poseidon"
    assert dist.get_backend(mesh["shard"].get_group()) == backend
    model = network()
    for block in model[1:3]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, rank, size)
    return whole(model)


def replicas(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    """Poseidon's replicas of a model that is sharded over the other dimension."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = network()
    if rank >= 2:  # the second replica takes over the first one's parameters
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
    for block in model[1:3]:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    assert poseidon.torch.replicate(model, mesh["replicate"]) is model
    train(model, rank, size)
    return whole(model)


def wrapped(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    """Poseidon's own class around a model that is sharded over the other dimension."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = network()
    if rank >= 2:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
    for block in model[1:3]:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    model = poseidon.torch.DistributedDataParallel(model, device_mesh=mesh["replicate"])
    train(model, rank, size)
    return whole(model)


def overlapped(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    """Updates that the next forward pass waits for, group by group."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = network()
    for block in model[1:3]:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    wrapper = poseidon.torch.DistributedDataParallel(model, device_mesh=mesh["replicate"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = poseidon.torch.DistributedOptimizer(optimizer, wrapper)
    waits = 0
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(wrapper, batch(step).chunk(size)[rank]).backward()
        optimizer.step()
        waits += sum(type(parameter).__name__ == "WatchedDTensor" for parameter in model.parameters())
    assert waits > 0, "every update was waited for"
    return whole(model)


def overlapped_and_clipped(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    """The program reads and scales gradients whose exchange is not over."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = network()
    fully_shard(model[1], mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    wrapper = poseidon.torch.DistributedDataParallel(model, device_mesh=mesh["replicate"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = poseidon.torch.DistributedOptimizer(optimizer, wrapper)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        for half in batch(step).chunk(size)[rank].chunk(2):
            (loss_of(wrapper, half) / 2).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.grad.mul_(2.0)
            for gradient in [parameter.grad for parameter in model.parameters()]:
                gradient.div_(2.0)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        optimizer.step()
    return whole(model)


def wrapped_tensor_parallel(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    model = network()
    for block in model[1:3]:
        parallelize_module(block, mesh["model"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model = poseidon.torch.DistributedDataParallel(model, device_mesh=mesh["data"])
    train(model, rank // 2, 2)
    return whole(model)


def overlapped_tensor_parallel(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    model = network()
    for block in model[1:3]:
        parallelize_module(block, mesh["model"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    wrapper = poseidon.torch.DistributedDataParallel(model, device_mesh=mesh["data"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = poseidon.torch.DistributedOptimizer(optimizer, wrapper)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        for half in batch(step).chunk(2)[rank // 2].chunk(2):
            (loss_of(wrapper, half) / 2).backward()
        optimizer.step()
    return whole(model)


def averaged(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    """LocalSGD between machines, with FSDP inside each."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = network()
    for block in model[1:3]:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = poseidon.torch.OuterNesterov(**OUTER)
    optimizer = poseidon.torch.LocalSGD(model, inner, 3, outer=outer, device_mesh=mesh["replicate"])
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(step).chunk(size)[rank]).backward()
        optimizer.step()
    with torch.no_grad():
        loss_of(model, batch(0))  # FSDP keeps what it gathers of the parameters that are averaged now
    optimizer.average()
    return whole(model)


def averaged_alone() -> list[torch.Tensor]:
    """The parameters that one process makes of it."""
    shared = network()
    outer = poseidon.torch.OuterNesterov(**OUTER).optimizer(shared.parameters())
    machines = [network(), network()]
    inners = [torch.optim.SGD(model.parameters(), lr=0.1) for model in machines]
    for step in range(STEPS):
        for machine, (model, inner) in enumerate(zip(machines, inners, strict=True)):
            inner.zero_grad()
            loss_of(model, batch(step).chunk(2)[machine]).backward()
            inner.step()
        if step >= 2:
            with torch.no_grad():
                for parameter, *theirs in zip(*(model.parameters() for model in (shared, *machines)), strict=True):
                    parameter.grad = parameter - sum(theirs) / 2
                outer.step()
                for model in machines:
                    for parameter, new in zip(model.parameters(), shared.parameters(), strict=True):
                        parameter.copy_(new)
    return [parameter.detach() for parameter in shared.parameters()]


def pipelined(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    """Stages of a pipeline along one dimension of the mesh, replicas of each along the other."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipe"))
    model, place, data = network(), rank % 2, rank // 2
    part = model[:2] if place == 0 else model[2:]
    part = poseidon.torch.DistributedDataParallel(part, device_mesh=mesh["data"])
    stage = PipelineStage(part, place, 2, torch.device("cpu"), group=mesh["pipe"].get_group())
    schedule = Schedule1F1B(stage, 2, lambda y, tokens: nn.functional.cross_entropy(y.flatten(0, 1), tokens.flatten()))
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        tokens = batch(step).chunk(2)[data]
        if place == 0:
            schedule.step(tokens[:, :-1])
        else:
            schedule.step(target=tokens[:, 1:])
        optimizer.step()
    for index, parameter in enumerate(model.parameters()):
        owner = 0 if index < len(list(model[:2].parameters())) else 1
        dist.broadcast(parameter.data, 2 * data + owner, group=mesh["pipe"].get_group())
    return whole(model)


def dropped_in(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    """A plain HSDP program, whose replicas exchange by Poseidon."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    restore = exchange_replicas()
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = network()
        for block in model[1:3]:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    finally:
        restore()
    (params,) = model._get_fsdp_state()._fsdp_param_groups
    assert dist.get_backend(params._all_reduce_process_group) == "poseidon"
    train(model, rank, size)
    return whole(model)


def replicas_of_narrow_gradients(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    """Computed in bfloat16: FSDP converts each gradient after the exchange. Only the replicas are compared."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = network()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model[1:3]:
        fully_shard(block, mesh=mesh["shard"], mp_policy=policy)
    fully_shard(model, mesh=mesh["shard"], mp_policy=policy)
    poseidon.torch.replicate(model, mesh["replicate"])
    train(model, rank, size)
    return whole(model)


def replicas_of_accumulated_gradients(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    """Two backward passes a step, of half a batch each: FSDP adds the second gradient to the first."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = network()
    fully_shard(model[1], mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    poseidon.torch.replicate(model, mesh["replicate"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for half in batch(step).chunk(size)[rank].chunk(2):
            (loss_of(model, half) / 2).backward()
        optimizer.step()
    return whole(model)


def shard_all(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (size,))
    model = network()
    for block in model[1:3]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, rank, size)
    return whole(model)


def replicate(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    """torch's DistributedDataParallel over the backend."""
    model = nn.parallel.DistributedDataParallel(network())
    train(model, rank, size)
    return whole(model)


def tensor_parallel(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (size,))
    model = network()
    for block in model[1:3]:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    train(model, 0, 1)
    return whole(model)


def inside(rank: int, function: Callable[..., Any], folder: str, size: int, backend: str) -> Any:
    dist.init_process_group(backend, init_method=f"file://{folder}", rank=rank, world_size=size)
    try:
        answer = function(rank, size, backend)
        dist.barrier()
        return [tensor.numpy() for tensor in answer]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        (shard_and_replicate, "poseidon"),
        (shard_and_replicate, "gloo"),
        (replicas, "poseidon"),
        (replicas, "gloo"),
        (replicas_of_accumulated_gradients, "gloo"),
        (dropped_in, "gloo"),
        (wrapped, "gloo"),
        (overlapped, "gloo"),
        (overlapped_and_clipped, "gloo"),
        (wrapped_tensor_parallel, "gloo"),
        (overlapped_tensor_parallel, "gloo"),
        (pipelined, "gloo"),
        (shard_all, "poseidon"),
        (replicate, "poseidon"),
        (tensor_parallel, "poseidon"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_parameters_are_those_of_one_process(case: Callable[..., Any], backend: str, tmp_path: Path) -> None:
    if (case, backend) == (shard_and_replicate, "gloo") and "backend_override" not in _names_of_init_device_mesh():
        pytest.skip("this torch has no backend_override")
    meeting = str(tmp_path / f"meeting-{next(_names)}")
    answers = TEAM.ask(4, 60.0 * workers.SLOWED, inside, case, meeting, 4, backend)
    for answer in answers:
        assert isinstance(answer, list), getattr(answer, "trace", answer)
    expected = alone()
    for answer in answers:
        for mine, theirs, first in zip(answer, expected, answers[0], strict=True):
            torch.testing.assert_close(torch.from_numpy(mine), theirs, rtol=1e-4, atol=1e-5)
            assert (mine == first).all(), "replicas differ"


def test_replicas_that_are_averaged_are_those_of_one_process(tmp_path: Path) -> None:
    answers = TEAM.ask(4, 60.0 * workers.SLOWED, inside, averaged, str(tmp_path / "meeting"), 4, "gloo")
    for answer in answers:
        assert isinstance(answer, list), getattr(answer, "trace", answer)
        for mine, theirs, first in zip(answer, averaged_alone(), answers[0], strict=True):
            torch.testing.assert_close(torch.from_numpy(mine), theirs, rtol=1e-4, atol=1e-5)
            assert (mine == first).all(), "replicas differ"


def test_replicas_of_narrow_gradients_are_the_same(tmp_path: Path) -> None:
    answers = TEAM.ask(
        4, 60.0 * workers.SLOWED, inside, replicas_of_narrow_gradients, str(tmp_path / "meeting"), 4, "gloo"
    )
    for answer in answers:
        assert isinstance(answer, list), getattr(answer, "trace", answer)
        for mine, first, alone_trained in zip(answer, answers[0], alone(), strict=True):
            assert (mine == first).all(), "replicas differ"
            torch.testing.assert_close(torch.from_numpy(mine), alone_trained, rtol=0.1, atol=0.02)


def refuse(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    sharded, whole_mesh = network(), network()
    fully_shard(sharded, mesh=mesh["shard"])
    fully_shard(whole_mesh, mesh=mesh)
    for model, dimension, remedy in (
        (network(), mesh["replicate"], "fully_shard"),
        (whole_mesh, mesh["replicate"], 'mesh["shard"]'),
        (sharded, mesh, "one dimension"),
    ):
        with pytest.raises(ValueError, match=re.escape(remedy)):
            poseidon.torch.replicate(model, dimension)
    poseidon.torch.replicate(sharded, mesh["replicate"])
    with pytest.raises(ValueError, match="already"):
        poseidon.torch.replicate(sharded, mesh["replicate"])
    return []


def test_models_that_cannot_be_replicas_are_refused_with_what_to_write(tmp_path: Path) -> None:
    for answer in TEAM.ask(4, 60.0 * workers.SLOWED, inside, refuse, str(tmp_path / "meeting"), 4, "poseidon"):
        assert answer == [], getattr(answer, "trace", answer)


def _names_of_init_device_mesh() -> tuple[str, ...]:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh.__code__.co_varnames
