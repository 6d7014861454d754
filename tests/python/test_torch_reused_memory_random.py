"""Random programs that write into memory they have given away: plainly and with updates that wait, as one process."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import poseidon.torch as poseidon
import workers
from overlap_cases import Model
from torch_cases import all_equal, parameters_digest

WIDTH, ROWS, STEPS = 400, 4, 4
JOBS = 16


@dataclass
class Job:
    """One random program. All of it follows from the seed."""

    seed: int
    layers: int = 2
    place: str = ""  # how a parameter joins the rows, so that its gradient is theirs
    tied: str = ""  # which parameters share memory, or with what
    source: str = ""  # of inputs
    start: str = ""  # how backward begins
    refill: str = ""  # what is written when backward or step() is over
    rewrites: bool = False  # a hook overwrites activations that backward is past
    reached: str = ""  # by what gradients are scaled
    parts: int = 1  # forward passes of a step; all but the last without exchange
    keeps: bool = False  # .grad is zeroed in place
    scheme: str = "auto"
    adam: bool = False

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        self.layers = draw.choice([1, 2, 3])
        self.place = draw.choice(["", "view", "cat", "add"])
        self.tied = draw.choice(["", "", "data", "set", "flat", "numpy", "late"])
        self.source = draw.choice(["tensor", "numpy", "rollout", "alias", "leaf"])
        self.start = draw.choice(["loss", "buffer", "several"])
        self.refill = draw.choice(["", "early", "late", "both"])
        self.rewrites = draw.random() < 0.3
        self.reached = draw.choice(["", "kept", "numpy", "view", "flat", "param"])
        self.parts = draw.choice([1, 1, 2])
        self.keeps = draw.random() < 0.5 or self.reached == "flat"
        self.scheme = draw.choice(["auto", "auto", "sfb", "ps"])
        self.adam = draw.random() < 0.4


class Net(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        torch.manual_seed(job.seed)
        self.job = job
        self.hidden = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(job.layers + 1))
        self.place = nn.Parameter(0.1 * torch.randn(2, ROWS // 2, WIDTH))
        self.last = nn.Linear(WIDTH, 8)
        self.kept: list[Any] = []
        self.share()

    def share(self, late: bool = False) -> None:
        first, second = self.hidden[0], self.hidden[1]
        kind = self.job.tied
        if kind == "data" or (kind == "late" and late):
            second.weight.data = first.weight.data
        elif kind == "set":
            with torch.no_grad():
                second.bias.set_(first.weight.detach()[3])
        elif kind == "flat":
            flat = torch.cat([first.weight.detach().reshape(-1), first.bias.detach()])
            first.weight.data, first.bias.data = flat[:-WIDTH].view(WIDTH, WIDTH), flat[-WIDTH:]
            self.kept = [flat]
        elif kind == "numpy":
            array = first.weight.detach().numpy().copy()
            first.weight.data = torch.from_numpy(array)
            self.kept = [array]

    def decay(self) -> None:
        """Reaches the parameters past them."""
        for one in self.kept:
            one *= 0.99

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.hidden:
            given = x.clone()
            output = layer(given)
            if self.job.rewrites and x.requires_grad and x.grad_fn is not None:
                x.register_hook(lambda grad, given=given, output=output: _overwritten(given, output))
            x = torch.relu(output) + (0.1 * output)
        if self.job.place == "view":
            x = x + self.place.view(ROWS, WIDTH)
        elif self.job.place == "cat":
            x = torch.cat([x, self.place[0], self.place[1]])
        elif self.job.place == "add":
            x = self.last(x) + self.place.view(ROWS, WIDTH)[:, :8]
            return x * 2
        return self.last(x)


def _overwritten(*rows: torch.Tensor) -> None:
    for one in rows:
        one.data.fill_(3.0)


@dataclass
class Rank:
    """What one rank has: its random numbers, and the memory that it uses again."""

    job: Job
    generator: torch.Generator
    batch: torch.Tensor = field(init=False)
    array: Any = None
    buffers: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.batch = torch.zeros(ROWS, WIDTH)
        if self.job.source == "numpy":
            self.array = np.zeros((ROWS, WIDTH), np.float32)
            self.batch = torch.from_numpy(self.array)
        elif self.job.source == "rollout":
            self.batch = torch.zeros(3, ROWS, WIDTH)[1]
        elif self.job.source == "leaf":
            self.batch.requires_grad_()

    def fill(self, values: torch.Tensor | float) -> None:
        if self.array is not None:
            self.array[:] = values.numpy() if isinstance(values, torch.Tensor) else values
        elif isinstance(values, torch.Tensor):
            self.batch.data.copy_(values)
        else:
            self.batch.detach().fill_(values)

    def backward(self, model: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """A forward and a backward pass; what they were given is overwritten at once, where the job says so."""
        self.fill(torch.randn(ROWS, WIDTH, generator=self.generator))
        output = model(self.batch.detach() if self.job.source == "alias" else self.batch)
        gradient = 0.01 * torch.randn(output.shape, generator=self.generator)
        buffer = self.buffers.setdefault(output.shape[0], torch.empty(output.shape))
        buffer.copy_(gradient)
        if self.job.start == "loss":
            (output * gradient).sum().backward()
        elif self.job.start == "buffer":
            output.backward(buffer)
        else:
            torch.autograd.backward([output, output.sum()], [buffer, torch.tensor(0.001)])
        if self.job.refill in ("early", "both"):
            self.overwrite()

    def overwrite(self) -> None:
        self.fill(9.0)
        for buffer in self.buffers.values():
            buffer.numpy()[:] = -5.0


class Gradients:
    """Scales the gradients by what reaches them."""

    def __init__(self, job: Job, params: list[nn.Parameter]) -> None:
        self.job, self.params = job, params
        self.flat: torch.Tensor | None = None
        if job.reached == "flat":
            self.flat = torch.zeros(sum(param.numel() for param in params))
            for param, part in zip(params, self.flat.split([param.numel() for param in params]), strict=True):
                param.grad = part.view_as(param)
        self.kept: list[Any] = []

    def scale(self) -> None:
        if self.flat is not None:
            self.flat.mul_(0.5)
        elif self.job.reached == "param":
            torch._foreach_mul_([param.grad for param in self.params if param.grad is not None], 0.5)
        elif self.job.reached and self.kept and self.job.keeps:
            for one in self.kept:
                one *= 0.5
        elif self.job.reached:
            grads = [param.grad for param in self.params[:4] if param.grad is not None]
            if self.job.reached == "numpy":
                self.kept = [grad.detach().numpy() for grad in grads]
            else:
                self.kept = [grad.detach()[:2] if self.job.reached == "view" else grad for grad in grads]


def optimizer_of(job: Job, net: Net) -> torch.optim.Optimizer:
    if job.adam:
        return torch.optim.Adam(net.parameters(), lr=1e-3, eps=1e-3)
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def train(job: Job, overlap: bool) -> Net:
    net = Net(job)
    model = Model(net, scheme=job.scheme)
    optimizer: Any = optimizer_of(job, net)
    if overlap:
        optimizer = poseidon.DistributedOptimizer(optimizer, model)
    rank = Rank(job, torch.Generator().manual_seed(100 * job.seed + poseidon.rank()))
    gradients = Gradients(job, list(net.parameters()))
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=not job.keeps)
        for part in range(job.parts):
            with nullcontext() if part == job.parts - 1 else model.no_sync():
                rank.backward(model)
        gradients.scale()
        if step == 1:
            net.share(late=True) if job.tied == "late" else None
        optimizer.step()
        net.decay()
        if job.refill in ("late", "both"):
            rank.overwrite()
    return net


def reference(job: Job) -> Net:
    """One process that does the work of all ranks."""
    net = Net(job)
    optimizer = optimizer_of(job, net)
    params = list(net.parameters())
    ranks = [Rank(job, torch.Generator().manual_seed(100 * job.seed + one)) for one in range(poseidon.world_size())]
    gradients = Gradients(job, params)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=not job.keeps)
        places = [param.grad for param in params]
        sums: list[torch.Tensor | None] = [None for _ in params]
        for rank in ranks:
            for param in params:
                param.grad = None
            for _ in range(job.parts):
                rank.backward(net)
            for index, param in enumerate(params):
                if param.grad is not None:
                    part = param.grad.detach().clone()
                    sums[index] = part if sums[index] is None else sums[index] + part
        for param, place, total in zip(params, places, sums, strict=True):
            param.grad = place
            if total is not None:
                mean = total / len(ranks)
                param.grad = mean if place is None else place.copy_(mean)
        gradients.scale()
        if step == 1:
            net.share(late=True) if job.tied == "late" else None
        optimizer.step()
        net.decay()
    return net


def difference(seed: int) -> tuple[str, str]:
    """What is wrong with a job, if anything, and a digest of what came out."""
    job = Job(seed)
    expected = dict(reference(job).named_parameters())
    digests = []
    for overlap in (False, True):
        net = train(job, overlap)
        for name, param in net.named_parameters():
            if not torch.allclose(param, expected[name], rtol=1e-3, atol=1e-4):
                most = (param - expected[name]).abs().max().item()
                return f"{job} {name} with overlap {overlap}: {most}", ""
        digests.append(parameters_digest(net))
    return "", " ".join(digests)


def differences(seeds: list[int]) -> list[tuple[str, str]]:
    return [difference(seed) for seed in seeds]


@pytest.mark.filterwarnings("ignore:step. waits for the gradients")
def test_random_programs() -> None:
    found = workers.run(2, differences, list(range(JOBS)))
    assert [text for text, _ in found[0] if text] == []
    assert all_equal(found)
