"""Random training jobs about optimizers: with DistributedOptimizer they always have the bits of plain loops.

`check(draw(seed))` runs one job in all workers. A job changes optimizers in mid-run, weighs ranks, accumulates, reads
gradients on some ranks, clears them or not, leaves batches out, recomputes blocks, and schedules learning rates.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop
from torch.utils.checkpoint import checkpoint

import poseidon.torch as poseidon
from optimizer_kinds import NOT_PER_PARAMETER, Signed
from torch_cases import digest, mean_loss, mlp_batch, own_rows, parameters_digest

Make = Callable[[Any], Optimizer]

ON_SERVERS: list[Make] = [
    lambda params: SGD(params, lr=0.02),
    lambda params: SGD(params, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01),
    lambda params: SGD(params, lr=0.02, momentum=0.8, dampening=0.2),
    lambda params: Adam(params, lr=0.01, weight_decay=0.02),
    lambda params: AdamW(params, lr=0.01, maximize=True),
]
KNOWN: list[Make] = [
    *ON_SERVERS,
    lambda params: Adam(params, lr=0.01, amsgrad=True, foreach=True),
    lambda params: AdamW(params, lr=torch.tensor(0.01), foreach=False),
    lambda params: RMSprop(params, lr=0.005, centered=True),
    lambda params: Adagrad(params, lr=0.02),
    lambda params: NAdam(params, lr=0.005),
]
UNKNOWN: list[Make] = [*NOT_PER_PARAMETER[1:], Signed]  # not the one that draws random numbers


@dataclass(frozen=True)
class Part:
    """Some steps with one optimizer."""

    kind: str  # worker, server, whole, or said (per_parameter=True)
    make: Make
    head_only: bool
    steps: int


@dataclass(frozen=True)
class Job:
    """One random training."""

    seed: int
    widths: tuple[int, ...]
    parts: tuple[Part, ...]
    recomputes: str  # no, block, later (a block reads the last layer's weight)
    clears: str  # none, zeros, never
    micro: int  # backward passes under no_sync() before each exchange
    weighs: bool
    reads: tuple[int, ...]  # ranks that look at gradients
    left_out: int  # the step in which rank 0's loss is a fresh zero; -1: in none
    decays: bool
    options: tuple[tuple[str, Any], ...]  # of the wrapper


class Net(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        torch.manual_seed(job.seed)
        sizes = (48, *job.widths)
        self.blocks = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.last = nn.Linear(sizes[-1], 4)
        self.recomputes = job.recomputes

    def block(self, number: int, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.blocks[number](x))
        return x * (1 + self.last.weight.detach().square().mean()) if self.recomputes == "later" else x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(len(self.blocks)):
            if self.recomputes == "no":
                x = self.block(number, x)
            else:
                x = checkpoint(self.block, number, x, use_reentrant=False)
        return self.last(x)


def draw(seed: int) -> Job:
    """The job of this seed."""
    choose = random.Random(seed)
    parts = []
    for _ in range(choose.choice([1, 1, 2, 3])):
        kind = choose.choice(["worker", "worker", "server", "server", "whole", "said"])
        makes = {"worker": KNOWN, "server": ON_SERVERS, "whole": UNKNOWN, "said": [Signed]}[kind]
        parts.append(Part(kind, choose.choice(makes), choose.random() < 0.25, choose.randint(2, 4)))
    clears = choose.choice(["none", "none", "zeros", "never"])
    return Job(
        seed=seed,
        widths=tuple(choose.randint(1, 150) for _ in range(choose.randint(1, 3))),
        parts=tuple(parts),
        recomputes=choose.choice(["no", "no", "block", "later"]),
        clears=clears,
        micro=choose.choice([0, 0, 1, 2]),
        weighs=choose.random() < 0.4,
        reads=tuple(rank for rank in range(3) if choose.random() < 0.3),
        left_out=choose.choice([-1, -1, 1]) if clears != "never" else -1,
        decays=choose.random() < 0.5,
        options=(("scheme", "ps"),),
    )


def _optimizer(part: Part, model: Any, distributes: bool) -> Any:
    params = list((model.module.last if part.head_only else model.module).parameters())
    optimizer = part.make(params)
    if not distributes:
        return optimizer
    if part.kind == "server":
        return poseidon.DistributedOptimizer(optimizer, model, update="server")
    return poseidon.DistributedOptimizer(optimizer, model, per_parameter=part.kind == "said")


def _step(job: Job, model: Any, optimizer: Any, number: int) -> None:
    rank, size = poseidon.rank(), poseidon.world_size()

    def loss(salt: int) -> torch.Tensor:
        return mean_loss(model, *map(own_rows, mlp_batch(100 * salt + number, 4 * size)))

    if job.clears != "never":
        for one in (optimizer, model):
            one.zero_grad(set_to_none=job.clears == "none")
    if job.weighs:
        model.set_weight(1 + (number + rank) % 3)
    for micro in range(job.micro):
        with model.no_sync():
            loss(1 + micro).backward()
    final = loss(0)
    if number == job.left_out and rank == 0:
        final = (
            torch.zeros((), requires_grad=True) if isinstance(optimizer, poseidon.DistributedOptimizer) else 0 * final
        )
    final.backward()
    if rank in job.reads:
        assert all(bool(param.grad.isfinite().all()) for param in model.parameters() if param.grad is not None)
    optimizer.step()
    if job.decays:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.9


def train(job: Job, distributes: bool) -> tuple[str, str]:
    """Digests of the parameters, and of the last optimizer's state."""
    model = poseidon.DistributedDataParallel(Net(job), **dict(job.options))
    number, optimizer = 0, None
    for part in job.parts:
        optimizer = _optimizer(part, model, distributes)
        for _ in range(part.steps):
            _step(job, model, optimizer, number)
            number += 1
    states = optimizer.state_dict()["state"]  # type: ignore[union-attr]
    tensors = [value for _, state in sorted(states.items()) for _, value in sorted(state.items())]
    return parameters_digest(model), digest([value for value in tensors if isinstance(value, torch.Tensor)])


def check(job: Job) -> str:
    """Raises AssertionError unless the job has the bits of plain loops. Returns its digest, for the other ranks'."""
    ours, theirs = train(job, True), train(job, False)
    assert ours == theirs, job
    return ours[0]
