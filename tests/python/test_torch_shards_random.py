"""Random programs with sharded models: any way to shard, to accumulate, to look at what is in flight, to update."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import poseidon.torch as poseidon
import workers
from sharded_cases import MACHINES, STEPS, batch, check_same, loss_of, mesh_of, network, run, tensor_parallel, whole

pytest.importorskip("poseidon._core", reason="the compiled core is not built")
pytest.importorskip("torch.distributed.fsdp", reason="this torch has no fully_shard")

TEAM = workers.Team(4)
FIRST, COUNT = int(os.environ.get("RANDOM_FIRST", "0")), int(os.environ.get("RANDOM_COUNT", "14"))


@dataclass(frozen=True)
class Job:
    """What one program does."""

    method: str  # replicate, wrap, overlap
    layout: str  # fsdp, tensor parallelism, both kinds of parameters
    blocks: tuple[int, ...]  # that are groups of their own
    reshard: bool  # after forward
    passes: str  # how a step accumulates
    clear: bool  # zero_grad(set_to_none=…)
    clip: float  # 0: it does not
    looks: tuple[str, ...]
    frozen: int  # this part of the network; -1: none
    skipped: int  # this block, in every second step; -1: none
    tied: bool
    optimizer: str

    @staticmethod
    def drawn(seed: int) -> Job:
        draw = random.Random(seed)
        layout = draw.choice(("fsdp", "fsdp", "fsdp", "tensor"))
        method = draw.choice(("replicate", "wrap", "overlap", "overlap"))
        passes = ["one", "two", "reduce-scatter last", "all-reduce last"]
        if method != "replicate":
            passes.append("no_sync")
        kinds = ("gradients", "parameters", "evaluation before", "evaluation after", "state", "average", "scale")
        rate = draw.choice((0.0, 0.1, 0.4))  # whoever looks waits, and then nothing is in flight
        looks = tuple(kind for kind in kinds if draw.random() < rate)
        return Job(
            method if layout == "fsdp" or method != "replicate" else "wrap",
            layout,
            tuple(block for block in (1, 2) if draw.random() < 0.7),
            # Without it FSDP computes the next step with what an evaluation before step() has gathered.
            draw.random() < 0.7 or "evaluation before" in looks,
            draw.choice(passes if layout == "fsdp" else [one for one in passes if not one.endswith("last")]),
            draw.random() < 0.5,
            draw.choice((0.0, 0.0, 0.0, 0.2, 50.0)) if layout == "fsdp" else 0.0,
            looks,
            draw.choice((-1, -1, 0, 1)),
            draw.choice((-1, -1, 2)),
            draw.random() < 0.3,
            draw.choice(("sgd", "momentum", "adamw")),
        )


class Network(nn.Module):
    """The network of `sharded_cases`, a block of which may be left out."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.parts = network()
        self.skips = -1
        if job.tied:
            self.parts[3].weight = self.parts[0].weight
        if job.frozen >= 0:
            self.parts[job.frozen].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, part in enumerate(self.parts):
            if index != self.skips:
                x = part(x)
        return x


def optimizer_of(model: nn.Module, job: Job) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if job.optimizer == "adamw":  # a large eps, since noise in gradients of zero would become steps
        return torch.optim.AdamW(trained, lr=1e-2, eps=1e-2)
    return torch.optim.SGD(trained, lr=0.1, momentum=0.9 * (job.optimizer == "momentum"), weight_decay=0.01)


@contextmanager
def accumulating(model: Any, trained: Any, passes: str) -> Iterator[None]:
    """Around all backward passes of a step but the last."""
    sharded = model if hasattr(model, "set_requires_all_reduce") else None
    if passes == "no_sync" and hasattr(trained, "no_sync"):
        with trained.no_sync():
            yield
        return
    switch = {"reduce-scatter last": "set_requires_gradient_sync", "all-reduce last": "set_requires_all_reduce"}
    switch_to = getattr(sharded, switch.get(passes, ""), None)
    if switch_to is not None:
        switch_to(False)
    yield
    if switch_to is not None:
        switch_to(True)


def look(kind: str, looks: tuple[str, ...], model: nn.Module, trained: Any, average: list[torch.Tensor]) -> None:
    """What a program does between backward and step ("gradients", "scale", …), or after it."""
    if kind not in looks:
        return
    with torch.no_grad():
        if kind == "gradients":
            assert all(bool((one.grad * 0 == 0).all()) for one in model.parameters() if one.grad is not None)
        elif kind == "scale":
            for one in model.parameters():
                if one.grad is not None:
                    one.grad.mul_(0.5)
        elif kind.startswith("evaluation"):
            loss_of(trained, batch(99))
        elif kind == "parameters":
            assert all(bool((one * 0 == 0).all()) for one in model.parameters())
        elif kind == "state":
            assert all(bool((value * 0 == 0).all()) for value in model.state_dict().values())
        elif kind == "average":
            for mean, one in zip(average, model.parameters(), strict=True):
                mean.mul_(0.9).add_(one, alpha=0.1)


def train(job: Job, model: Any, trained: Any, optimizer: Any, part: int, parts: int) -> list[torch.Tensor]:
    average = [parameter.detach().clone() for parameter in model.parameters()]
    inner = getattr(model, "module", model)
    for step in range(STEPS):
        inner.skips = job.skipped if step % 2 else -1
        optimizer.zero_grad(set_to_none=job.clear)
        tokens = batch(step).chunk(parts)[part]
        some = tokens.chunk(1 if job.passes == "one" else 2)
        with accumulating(model, trained, job.passes):
            for one in some[:-1]:
                (loss_of(trained, one) / len(some)).backward()
        (loss_of(trained, some[-1]) / len(some)).backward()
        for kind in ("gradients", "scale", "evaluation before"):
            look(kind, job.looks, model, trained, average)
        if job.clip:
            with_gradients = [one for one in model.parameters() if one.grad is not None]
            torch.nn.utils.clip_grad_norm_(with_gradients, job.clip)
        optimizer.step()
        for kind in ("parameters", "state", "average", "evaluation after"):
            look(kind, job.looks, model, trained, average)
    return average


def distributed(rank: int, size: int, backend: str, job: Job) -> list[torch.Tensor]:
    mesh = mesh_of(*MACHINES)
    model: Any = Network(job)
    part, parts = rank, size
    if job.layout == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for block in job.blocks:
            fully_shard(model.parts[block], mesh=mesh["shard"], reshard_after_forward=job.reshard)
        fully_shard(model, mesh=mesh["shard"], reshard_after_forward=job.reshard)
    else:
        model.parts = tensor_parallel(mesh["shard"], model.parts)
        part, parts = rank // 2, 2
    if job.method == "replicate":
        trained = poseidon.replicate(model, mesh["replicate"])
    else:
        trained = poseidon.DistributedDataParallel(model, device_mesh=mesh["replicate"])
    optimizer: Any = optimizer_of(model, job)
    if job.method == "overlap":
        optimizer = poseidon.DistributedOptimizer(optimizer, trained)
    average = train(job, model, trained, optimizer, part, parts)
    if hasattr(model, "reshard"):
        model.reshard()  # what the last evaluation has gathered
    means = [mean.full_tensor() if hasattr(mean, "full_tensor") else mean for mean in average]
    return whole(model) + means


def alone(job: Job) -> list[torch.Tensor]:
    model = Network(job)
    average = train(job, model, model, optimizer_of(model, job), 0, 1)
    return [parameter.detach() for parameter in model.parameters()] + average


@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
def test_random_programs_train_as_one_process(seed: int, tmp_path: Path) -> None:
    job = Job.drawn(seed)
    answers = run(TEAM, distributed, tmp_path, job=job)
    check_same(answers, alone(job), rtol=1e-3, atol=2e-5)
