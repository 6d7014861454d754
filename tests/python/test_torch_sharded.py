"""Models that others have sharded, over the backend `poseidon`: parameters as in one process, replicas the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import workers
from poseidon.torch import DistributedDataParallel, replace_ddp
from poseidon.torch.backend.hsdp import exchange_replicas
from sharded_cases import MACHINES, Scene, alone, check_same, mesh_of, network, run, sharded, tensor_parallel, train
from sharded_cases import whole as parameters_of

pytest.importorskip("poseidon._core", reason="the compiled core is not built")
pytest.importorskip("torch.distributed.fsdp", reason="this torch has no fully_shard")

TEAM = workers.Team(4)


def shard_and_replicate(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    override = {"backend_override": {"replicate": "poseidon"}} if backend == "gloo" else {}
    mesh = mesh_of(*MACHINES, **override)
    assert dist.get_backend(mesh["replicate"].get_group()) == "poseidon"
    assert dist.get_backend(mesh["shard"].get_group()) == backend
    model = sharded(mesh)
    train(model, rank, size)
    return parameters_of(model)


def dropped_in(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    """A plain HSDP program, whose replicas exchange by Poseidon."""
    restore = exchange_replicas()
    try:
        model = sharded(mesh_of(*MACHINES))
    finally:
        restore()
    (params,) = model._get_fsdp_state()._fsdp_param_groups
    assert dist.get_backend(params._all_reduce_process_group) == "poseidon"
    train(model, rank, size)
    return parameters_of(model)


def composed(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    """torch's composable replicate(), under `--drop-in`."""
    restore = replace_ddp()
    try:
        from torch.distributed._composable.replicate import replicate as make_replicas

        model = make_replicas(network())
        train(model, rank, size)
        assert isinstance(make_replicas.state(model)._ddp_weakref(), DistributedDataParallel)
    finally:
        restore()
    return parameters_of(model)


def composed_with_fsdp(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    """Its newer form, which uses what FSDP2 has."""
    restore = exchange_replicas()
    try:
        from torch.distributed._composable.replicate_with_fsdp import replicate as make_replicas

        model = network()
        for block in model[1:3]:
            make_replicas(block)
        make_replicas(model)
    finally:
        restore()
    train(model, rank, size)
    return parameters_of(model)


def shard_all(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh

    model = sharded(init_device_mesh("cpu", (size,)))
    train(model, rank, size)
    return parameters_of(model)


def replicate(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    """torch's DistributedDataParallel over the backend."""
    model = nn.parallel.DistributedDataParallel(network())
    train(model, rank, size)
    return parameters_of(model)


def cut_layers(rank: int, size: int, backend: str) -> list[torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh

    model = tensor_parallel(init_device_mesh("cpu", (size,)))
    train(model, 0, 1)
    return parameters_of(model)


@pytest.mark.parametrize(
    ("scene", "backend"),
    [
        (shard_and_replicate, "poseidon"),
        (shard_and_replicate, "gloo"),
        (dropped_in, "gloo"),
        (composed, "gloo"),
        (composed_with_fsdp, "gloo"),
        (shard_all, "poseidon"),
        (replicate, "poseidon"),
        (cut_layers, "poseidon"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_parameters_are_those_of_one_process(scene: Scene, backend: str, tmp_path: Path) -> None:
    if (scene, backend) == (shard_and_replicate, "gloo") and "backend_override" not in _names_of_init_device_mesh():
        pytest.skip("this torch has no backend_override")
    check_same(run(TEAM, scene, tmp_path, backend), alone())


def _names_of_init_device_mesh() -> tuple[str, ...]:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh.__code__.co_varnames
