"""Replicas of sharded models by Poseidon's own classes: parameters as in one process, replicas the same."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import poseidon.torch as poseidon
import workers
from sharded_cases import (
    MACHINES,
    STEPS,
    Scene,
    alone,
    batch,
    check_same,
    loss_of,
    made,
    mesh_of,
    momentum_sgd,
    network,
    run,
    sharded,
    shift,
    tensor_parallel,
    train,
)
from sharded_cases import whole as parameters_of

pytest.importorskip("poseidon._core", reason="the compiled core is not built")
pytest.importorskip("torch.distributed.fsdp", reason="this torch has no fully_shard")

TEAM = workers.Team(4)
OUTER = {"lr": 0.7, "momentum": 0.9}


def replicated(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    mesh = mesh_of(*MACHINES)
    model = sharded(mesh["shard"])
    if rank >= 2:  # the second replica takes over the first one's parameters
        shift(model)
    assert poseidon.replicate(model, mesh["replicate"]) is model
    train(model, rank, size)
    return parameters_of(model)


def replicated_by_group(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    """The same with a process group in place of a mesh, and all of torch's groups by the backend `poseidon`."""
    mesh = mesh_of(*MACHINES)
    model = sharded(mesh["shard"])
    poseidon.replicate(model, mesh["replicate"].get_group())
    train(model, rank, size)
    return parameters_of(model)


def wrapped(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    mesh = mesh_of(*MACHINES)
    model = sharded(mesh["shard"])
    if rank >= 2:
        shift(model)
    model = poseidon.DistributedDataParallel(model, device_mesh=mesh["replicate"])
    train(model, rank, size)
    return parameters_of(model)


def wrapped_again(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    """A second wrapper of the same model, as after a first one that was made for a test."""
    mesh = mesh_of(*MACHINES)
    model = sharded(mesh["shard"])
    first = poseidon.DistributedDataParallel(model, device_mesh=mesh["replicate"])
    loss_of(first, batch(0)).backward()
    first.zero_grad()
    train(poseidon.DistributedDataParallel(model, device_mesh=mesh["replicate"]), rank, size)
    return parameters_of(model)


def after_evaluation(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    """FSDP keeps what an evaluation gathers of the parameters, which the first replica's replace then."""
    mesh = mesh_of(*MACHINES)
    model = sharded(mesh["shard"])
    if rank >= 2:
        shift(model)
    with torch.no_grad():
        loss_of(model, batch(0))
    poseidon.replicate(model, mesh["replicate"])
    train(model, rank, size)
    return parameters_of(model)


def accumulated(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    """Two backward passes a step, of half a batch each: FSDP adds the second gradient to the first."""
    mesh = mesh_of(*MACHINES)
    model = poseidon.replicate(sharded(mesh["shard"]), mesh["replicate"])
    train(model, rank, size, halves=2, clear=False)
    return parameters_of(model)


def accumulated_on_the_machine(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    """The first pass exchanges nothing between machines, as its program says in FSDP's way, or in torch's."""
    mesh = mesh_of(*MACHINES)
    model = sharded(mesh["shard"])
    wrapper = poseidon.DistributedDataParallel(model, device_mesh=mesh["replicate"])
    optimizer = momentum_sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        first, second = batch(step).chunk(size)[rank].chunk(2)
        if step % 2:
            model.set_requires_all_reduce(False)
            (loss_of(wrapper, first) / 2).backward()
            model.set_requires_all_reduce(True)
        else:
            with wrapper.no_sync():
                (loss_of(wrapper, first) / 2).backward()
        before = [parameter.grad.to_local().clone() for parameter in model.parameters()]
        everywhere = [None] * 2
        dist.all_gather_object(everywhere, [tensor.sum().item() for tensor in before], mesh["replicate"].get_group())
        assert everywhere[0] != everywhere[1], "the first pass was exchanged"
        (loss_of(wrapper, second) / 2).backward()
        optimizer.step()
    return parameters_of(model)


def overlapped(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    """Updates that the next forward pass waits for, group by group."""
    model, wrapper, optimizer = made(2, overlaps=True)
    waits = 0
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(wrapper, batch(step).chunk(size)[rank]).backward()
        optimizer.step()
        waits += sum(type(parameter).__name__ == "WatchedDTensor" for parameter in model.parameters())
    assert waits > 0, "every update was waited for"
    return parameters_of(model)


def overlapped_and_read(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    """The program reads and scales gradients whose exchange is not over, and parameters whose update is not made."""
    model, wrapper, optimizer = made(2, overlaps=True)
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
        seen = [parameter.to_local().clone() for parameter in model.parameters()]
        optimizer.synchronize()
        for parameter, was in zip(model.parameters(), seen, strict=True):
            assert torch.equal(parameter.to_local(), was), "a parameter was read before its update"
    return parameters_of(model)


def clipped_by_the_optimizer(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    mesh = mesh_of(*MACHINES)
    model = sharded(mesh["shard"])
    wrapper = poseidon.DistributedDataParallel(model, device_mesh=mesh["replicate"])
    train(wrapper, rank, size, poseidon.DistributedOptimizer(momentum_sgd(model), wrapper, max_norm=1e6))
    return parameters_of(model)


def cut_layers(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    mesh = mesh_of("data", "model")
    model = poseidon.DistributedDataParallel(tensor_parallel(mesh["model"]), device_mesh=mesh["data"])
    train(model, rank // 2, 2)
    return parameters_of(model)


def overlapped_cut_layers(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    mesh = mesh_of("data", "model")
    model = poseidon.DistributedDataParallel(tensor_parallel(mesh["model"]), device_mesh=mesh["data"])
    optimizer = poseidon.DistributedOptimizer(momentum_sgd(model), model)
    train(model, rank // 2, 2, optimizer, halves=2, clear=False)
    return parameters_of(model)


def pipelined(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    """Stages of a pipeline along one dimension of the mesh, replicas of each along the other."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh = mesh_of("data", "pipe")
    model, place, data = network(), rank % 2, rank // 2
    part: nn.Module = model[:2] if place == 0 else model[2:]
    part = poseidon.DistributedDataParallel(part, device_mesh=mesh["data"])
    stage = PipelineStage(part, place, 2, torch.device("cpu"), group=mesh["pipe"].get_group())
    schedule = Schedule1F1B(stage, 2, lambda y, tokens: nn.functional.cross_entropy(y.flatten(0, 1), tokens.flatten()))
    optimizer = momentum_sgd(part)
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
    return parameters_of(model)


@pytest.mark.parametrize(
    "scene",
    [
        replicated,
        replicated_by_group,
        wrapped,
        wrapped_again,
        after_evaluation,
        accumulated,
        accumulated_on_the_machine,
        overlapped,
        overlapped_and_read,
        clipped_by_the_optimizer,
        cut_layers,
        overlapped_cut_layers,
        pipelined,
    ],
    ids=lambda scene: scene.__name__,
)
def test_parameters_are_those_of_one_process(scene: Scene, tmp_path: Path) -> None:
    backend = "poseidon" if scene is replicated_by_group else "gloo"
    check_same(run(TEAM, scene, tmp_path, backend), alone())


def train_steps(model: nn.Module, optimizer: Any, steps: range, rank: int, size: int) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, batch(step).chunk(size)[rank]).backward()
        optimizer.step()


def saved_and_loaded(rank: int, size: int, machines: int, overlaps: bool) -> list[torch.Tensor]:
    """torch's distributed checkpoint, in the middle of training, of two machines for another number of them."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, trained, optimizer = made(2, overlaps)
    train_steps(trained, optimizer, range(2), rank, size)
    folder: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    checkpoint.save(
        dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder[0]
    )
    train_steps(trained, optimizer, range(2, 3), rank, size)  # which the checkpoint does not have
    model, trained, optimizer = made(machines, overlaps)
    shift(model)
    state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    checkpoint.load(state, checkpoint_id=folder[0])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    train_steps(trained, optimizer, range(2, STEPS), rank, size)
    answer = parameters_of(model)
    if rank == 0:
        shutil.rmtree(folder[0])
    return answer


def loaded_on_two_machines(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    return saved_and_loaded(rank, size, 2, overlaps=False)


def loaded_on_four_machines_with_overlap(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    return saved_and_loaded(rank, size, 4, overlaps=True)


@pytest.mark.parametrize(
    "scene", [loaded_on_two_machines, loaded_on_four_machines_with_overlap], ids=lambda scene: scene.__name__
)
def test_a_checkpoint_of_some_machines_is_loaded_on_others(scene: Scene, tmp_path: Path) -> None:
    check_same(run(TEAM, scene, tmp_path), alone())


def rounded(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    """Gradients travel in bfloat16, and servers keep what is rounded off."""
    mesh = mesh_of(*MACHINES)
    model = poseidon.replicate(sharded(mesh["shard"]), mesh["replicate"], wire="bf16")
    train(model, rank, size)
    return parameters_of(model)


def computed_in_bfloat16(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    """FSDP converts each gradient after it was reduced inside the machine."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    mesh = mesh_of(*MACHINES)
    model = sharded(mesh["shard"], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    train(poseidon.replicate(model, mesh["replicate"]), rank, size)
    return parameters_of(model)


@pytest.mark.parametrize("scene", [rounded, computed_in_bfloat16], ids=lambda scene: scene.__name__)
def test_replicas_of_rounded_gradients_are_the_same(scene: Scene, tmp_path: Path) -> None:
    check_same(run(TEAM, scene, tmp_path), alone(), rtol=0.1, atol=0.02)


def averaged(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    """DiLoCo between machines, with FSDP inside each."""
    mesh = mesh_of(*MACHINES)
    model = sharded(mesh["shard"])
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = poseidon.OuterNesterov(**OUTER)
    optimizer = poseidon.LocalSGD(model, inner, 3, outer=outer, device_mesh=mesh["replicate"])
    train(model, rank, size, optimizer)
    with torch.no_grad():
        loss_of(model, batch(0))  # FSDP keeps what it gathers of the parameters that are averaged now
    optimizer.average()
    return parameters_of(model)


def averaged_alone() -> list[torch.Tensor]:
    """The parameters that one process makes of it."""
    shared = network()
    outer = poseidon.OuterNesterov(**OUTER).optimizer(shared.parameters())
    machines = [network(), network()]
    inners = [torch.optim.SGD(model.parameters(), lr=0.1) for model in machines]
    for step in range(STEPS):
        for machine, (model, inner) in enumerate(zip(machines, inners, strict=True)):
            inner.zero_grad()
            loss_of(model, batch(step).chunk(2)[machine]).backward()
            inner.step()
        if step >= 2:
            _average(shared, machines, outer)
    return [parameter.detach() for parameter in shared.parameters()]


@torch.no_grad()
def _average(shared: nn.Module, machines: list[nn.Sequential], outer: torch.optim.Optimizer) -> None:
    for parameter, *theirs in zip(*(model.parameters() for model in (shared, *machines)), strict=True):
        parameter.grad = parameter - sum(theirs) / 2
    outer.step()
    for model in machines:
        for parameter, new in zip(model.parameters(), shared.parameters(), strict=True):
            parameter.copy_(new)


def test_replicas_that_are_averaged_are_those_of_one_process(tmp_path: Path) -> None:
    check_same(run(TEAM, averaged, tmp_path), averaged_alone())


def wide_network() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 64))


def train_wide(model: nn.Module, part: int, parts: int) -> None:
    optimizer = momentum_sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        (model(x.chunk(parts)[part]) ** 2).mean().backward()
        optimizer.step()


def factors_of_parts(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    """A layer cut by columns and one cut by rows: what is cheaper travels as factors, as of a whole layer."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = mesh_of("data", "model")
    model = parallelize_module(wide_network(), mesh["model"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    wrapper = poseidon.DistributedDataParallel(model, device_mesh=mesh["data"])
    train_wide(wrapper, rank // 2, 2)
    plan = {row.layer: row for row in wrapper.plan()}
    assert plan["0.weight"].scheme == plan["2.weight"].scheme == "sfb", plan
    return parameters_of(model)


def test_layers_that_are_cut_give_factors(tmp_path: Path) -> None:
    model = wide_network()
    train_wide(model, 0, 1)
    check_same(run(TEAM, factors_of_parts, tmp_path), [parameter.detach() for parameter in model.parameters()])
