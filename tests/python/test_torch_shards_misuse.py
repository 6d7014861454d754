"""What programs do around replicas of sharded models: it is right, or refused with what to write."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
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
    tensor_parallel,
    train,
)
from sharded_cases import whole as parameters_of

pytest.importorskip("poseidon._core", reason="the compiled core is not built")
pytest.importorskip("torch.distributed.fsdp", reason="this torch has no fully_shard")

TEAM = workers.Team(4)


def past_forward(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    """The program calls the model's parts itself: no forward pass of the whole model begins."""
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of(*MACHINES)
    model = network()
    for part in model:
        fully_shard(part, mesh=mesh["shard"])
    poseidon.replicate(model, mesh["replicate"])
    optimizer = momentum_sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        tokens = batch(step).chunk(size)[rank]
        x = tokens[:, :-1]
        for part in model:
            x = part(x)
        nn.functional.cross_entropy(x.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    return parameters_of(model)


def by_a_method(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    """Another method than forward, which torch lets a program name."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network()

        def loss(self, tokens: torch.Tensor) -> torch.Tensor:
            return loss_of(self.layers, tokens)

    mesh = mesh_of(*MACHINES)
    model = Language()
    fully_shard(model, mesh=mesh["shard"])
    register_fsdp_forward_method(model, "loss")
    poseidon.replicate(model, mesh["replicate"])
    optimizer = momentum_sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        model.loss(batch(step).chunk(size)[rank]).backward()
        optimizer.step()
    return parameters_of(model)


def frozen_for_a_while(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    """As the parts of a GAN are, without training between."""
    mesh = mesh_of("data", "model")
    model = tensor_parallel(mesh["model"])
    wrapper = poseidon.DistributedDataParallel(model, device_mesh=mesh["data"])
    optimizer = momentum_sgd(model)
    for step in range(STEPS):
        model.requires_grad_(False)
        loss_of(wrapper, batch(99))
        model.requires_grad_(True)
        optimizer.zero_grad()
        loss_of(wrapper, batch(step).chunk(2)[rank // 2]).backward()
        optimizer.step()
    return parameters_of(model)


def with_kept_views(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    """Views of parameters from before the model was wrapped show each update."""
    from torch.distributed.tensor import DTensor

    mesh = mesh_of(*MACHINES)
    model = sharded(mesh["shard"])
    views = [parameter.detach().to_local() for parameter in model.parameters()]
    wrapper = poseidon.DistributedDataParallel(model, device_mesh=mesh["replicate"])
    optimizer = poseidon.DistributedOptimizer(momentum_sgd(model), wrapper)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(wrapper, batch(step).chunk(size)[rank]).backward()
        for parameter in model.parameters():
            assert isinstance(parameter.grad, DTensor)
            assert parameter.grad.to_local().shape == parameter.to_local().shape
        optimizer.step()
        seen = [view.clone() for view in views]
        optimizer.synchronize()
        assert all(map(torch.equal, seen, views)), "a view showed a parameter before its update"
    return parameters_of(model)


def joined(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    """The second machine runs out of data: its last step is the first machine's, updates in flight included."""
    model, wrapper, optimizer = made(2, overlaps=True)
    with wrapper.join():
        for step in range(STEPS - rank // 2):
            optimizer.zero_grad()
            loss_of(wrapper, batch(step).chunk(size)[rank]).backward()
            optimizer.step()
    return parameters_of(model)


@pytest.mark.parametrize(
    "scene", [past_forward, by_a_method, frozen_for_a_while, with_kept_views], ids=lambda scene: scene.__name__
)
def test_parameters_are_those_of_one_process(scene: Scene, tmp_path: Path) -> None:
    check_same(run(TEAM, scene, tmp_path), alone())


def test_a_machine_that_runs_out_of_data_takes_over_the_last_update(tmp_path: Path) -> None:
    answers = run(TEAM, joined, tmp_path)
    check_same(answers, answers[0])


def small(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    """One rank of each machine has no element of the model."""
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of(*MACHINES)
    torch.manual_seed(2)
    model = fully_shard(nn.Linear(8, 1), mesh=mesh["shard"])
    poseidon.replicate(model, mesh["replicate"])
    optimizer = momentum_sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        model(x.chunk(size)[rank]).pow(2).mean().backward()
        optimizer.step()
    return parameters_of(model)


def small_alone() -> list[torch.Tensor]:
    torch.manual_seed(2)
    model = nn.Linear(8, 1)
    optimizer = momentum_sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 8, generator=torch.Generator().manual_seed(step))).pow(2).mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def test_ranks_without_an_element_take_part(tmp_path: Path) -> None:
    check_same(run(TEAM, small, tmp_path), small_alone())


class Averages(nn.Module):
    """Its buffer is another tensor after each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean((0, 1))[:3]
        return y


def buffers(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    mesh = mesh_of("data", "model")
    model = Averages()
    model.layers = tensor_parallel(mesh["model"], model.layers)
    wrapper = poseidon.DistributedDataParallel(model, device_mesh=mesh["data"])
    train(wrapper, rank // 2, 2)
    with torch.no_grad():
        wrapper(batch(5)[:, :-1])  # brings the first replica's buffers
    return [model.mean.clone()]


def test_buffers_that_are_assigned_anew_are_the_first_replicas(tmp_path: Path) -> None:
    answers = run(TEAM, buffers, tmp_path)
    check_same(answers, answers[0])


def in_whole_steps(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    mesh = mesh_of(*MACHINES)
    model = sharded(mesh["shard"])
    wrapper = poseidon.DistributedDataParallel(model, device_mesh=mesh["replicate"])
    assert poseidon.DistributedOptimizer(torch.optim.AdamW(model.parameters()), wrapper).per_parameter
    adafactor = torch.optim.Adafactor(model.parameters())
    assert not poseidon.DistributedOptimizer(adafactor, wrapper, per_parameter=True).per_parameter
    return []


def test_optimizers_whose_steps_communicate_make_whole_steps(tmp_path: Path) -> None:
    run(TEAM, in_whole_steps, tmp_path)


def refuse_changes(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of(*MACHINES)
    blocks = network()
    fully_shard(blocks[1], mesh=mesh["shard"])
    with pytest.raises(ValueError, match="not sharded, beside others"):
        poseidon.replicate(blocks, mesh["replicate"])
    model = tensor_parallel(mesh["shard"])
    wrapper = poseidon.DistributedDataParallel(model, device_mesh=mesh["replicate"])
    with pytest.raises(ValueError, match="FSDP makes means without weights"):
        wrapper.set_weight(2)
    model[3].bias = nn.Parameter(torch.zeros(model[3].bias.shape))
    with pytest.raises(ValueError, match="was put into the model"):
        loss_of(wrapper, batch(0))
    return []


def test_changes_of_the_model_are_refused(tmp_path: Path) -> None:
    run(TEAM, refuse_changes, tmp_path)


def refuse(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    mesh = mesh_of(*MACHINES)
    model, over_both = sharded(mesh["shard"]), sharded(mesh)

    def check(remedy: str, call: Any, *arguments: Any, **named: Any) -> None:
        with pytest.raises(ValueError, match=re.escape(remedy)):
            call(*arguments, **named)

    check("fully_shard", poseidon.replicate, network(), mesh["replicate"])
    check("one dimension", poseidon.replicate, model, mesh)
    check('mesh["shard"]', poseidon.replicate, over_both, mesh["replicate"])
    check('mesh["replicate"]', poseidon.DistributedDataParallel, model)  # all ranks, which have different shards
    check('mesh["replicate"]', poseidon.LocalSGD, model, momentum_sgd(model), 2)
    wrapper = poseidon.DistributedDataParallel(model, device_mesh=mesh["replicate"])
    check("whole", poseidon.DistributedOptimizer, momentum_sgd(model), wrapper, "server")
    check("whole", poseidon.DistributedOptimizer, momentum_sgd(model), wrapper, max_norm=1.0, clip="previous")
    handle = model[3].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    check("after backward()", lambda: loss_of(wrapper, batch(0)).backward())
    handle.remove()
    return []


def test_what_would_train_wrong_is_refused_with_what_to_write(tmp_path: Path) -> None:
    run(TEAM, refuse, tmp_path)


def replicate_twice(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    mesh = mesh_of(*MACHINES)
    model = poseidon.replicate(sharded(mesh["shard"]), mesh["replicate"])
    with pytest.raises(ValueError, match="already"):
        poseidon.replicate(model, mesh["replicate"])
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    with pytest.raises(ValueError, match="was wrapped"):
        loss_of(model, batch(0))
    return []


def test_a_model_is_replicated_once_and_keeps_its_parameters(tmp_path: Path) -> None:
    run(TEAM, replicate_twice, tmp_path)


def dropped(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    """A model whose updates are in flight goes with the program's last reference to it."""
    model, wrapper, optimizer = made(2, overlaps=True)
    loss_of(wrapper, batch(0).chunk(size)[rank]).backward()
    optimizer.step()
    optimizer.synchronize()
    loss_of(wrapper, batch(1).chunk(size)[rank]).backward()
    gone = weakref.ref(model[1].up.weight)
    del model, wrapper, optimizer
    train(made(2, overlaps=False)[1], rank, size)  # lands what was in flight
    gc.collect()
    assert gone() is None, "the parameters of a dropped model are kept"
    return []


def test_a_dropped_model_keeps_no_memory(tmp_path: Path) -> None:
    run(TEAM, dropped, tmp_path)
