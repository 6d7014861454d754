"""Random training jobs: what a seed stands for, and its training on several workers beside one process that does all.

`run_job(seed)` runs on every rank and raises where the two differ. `describe(seed)` is what the job is.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import poseidon.torch as poseidon
from torch_cases import digest

ROWS = 4  # of one micro-batch on one rank
IN = 16
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, eps=1e-2),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-2),
    "foreach": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-2, fused=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.005, eps=1e-1),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.005, eps=1e-2),
    "groups": lambda params: _two_groups(list(params)),
}


@dataclass(frozen=True)
class Job:
    """One random job."""

    widths: tuple[int, ...]
    kind: str  # of block
    dtype: str
    tied: bool
    unused: bool
    accumulation: int
    no_sync: bool
    checkpointing: str
    compiled: str
    hook: str
    optimizer: str
    scheme: str
    wire: str
    update: str
    reused: bool  # the batch's memory is filled again
    given: bool  # backward gets its gradient in a buffer, which is filled again
    drop: bool  # ranks leave blocks out
    frozen: int  # from this step on the first block is; -1: never
    amp: str
    clip: bool
    set_to_none: bool
    between: str  # what the program does between steps
    static_graph: bool
    steps: int


def make(seed: int) -> Job:
    """The job of a seed."""
    draw = random.Random(seed)

    def often(value: Any, *others: Any, share: float = 0.6) -> Any:
        return value if draw.random() < share else draw.choice(others)

    blocks = draw.randint(1, 4)
    width = draw.choice([4, 16, 33])
    optimizer = draw.choice(list(OPTIMIZERS))
    update = draw.choice(["", "worker", "worker", "server"])
    dtype = often("float32", "float64", "bfloat16", share=0.7)
    wire = often("fp32", "bf16", "fp16", "int8", share=0.8) if dtype == "float32" else "fp32"
    scheme = often("auto", "ps", "sfb", share=0.5) if wire == "fp32" else "auto"
    if update == "server":
        optimizer, scheme = draw.choice(["sgd", "momentum", "adam", "adamw"]), "auto"
    kind = draw.choice(["linear", "linear", "norm", "batchnorm", "twice", "conv", "bare"])
    checkpointing = often("", "reentrant", "plain", share=0.6)
    if kind == "batchnorm" and checkpointing:
        checkpointing = ""  # made again it would count twice
    compiled = often("", "module", "method", share=0.96)
    drop = draw.random() < 0.25
    return Job(
        widths=(width,) * blocks,
        kind=kind,
        dtype=dtype,
        tied=draw.random() < 0.15 and not checkpointing,
        unused=draw.random() < 0.2,
        accumulation=draw.choice([1, 1, 1, 2, 3]),
        no_sync=draw.random() < 0.6 or update == "server",  # which takes one synchronizing backward for a step
        checkpointing=checkpointing,
        compiled="" if checkpointing or kind == "batchnorm" or drop else compiled,
        hook=often("", "tensor", "accumulated", "module", share=0.75),
        optimizer=optimizer,
        scheme=scheme,
        wire=wire,
        update=update,
        reused=draw.random() < 0.4,
        given=draw.random() < 0.25,
        drop=drop,
        frozen=draw.choice([-1, -1, -1, -1, 1, 2]),
        amp=often("", "autocast", "scaler", share=0.8) if dtype == "float32" and update != "server" else "",
        clip=draw.random() < 0.3 and update != "server",
        set_to_none=draw.random() < 0.7,
        between=often("", "evaluate", "evaluate past", "look", "edit", "reload", "state", "grads", share=0.4),
        static_graph=draw.random() < 0.1,
        steps=draw.randint(2, 5),
    )


def describe(seed: int) -> str:
    """The job in words."""
    return f"seed {seed}: {asdict(make(seed))}"


def options(seed: int) -> dict[str, Any]:
    """What init() gets. Few different ones, since each costs the workers a new meeting."""
    return random.Random(seed // 25).choice(
        [{}, {"small_bytes": 0}, {"small_bytes": 1 << 15}, {"chunk_bytes": 64}, {"priority_classes": 1}]
    )


def _two_groups(params: list[Any]) -> torch.optim.Optimizer:
    half = len(params) // 2
    groups = [{"params": params[:half]}, {"params": params[half:], "lr": 0.01, "momentum": 0.5}]
    return torch.optim.SGD([group for group in groups if group["params"]], lr=0.05)


class Block(nn.Module):
    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(width, width)
        self.norm: nn.Module = nn.Identity()
        if kind == "norm":
            self.norm = nn.LayerNorm(width)
        elif kind == "batchnorm":
            self.norm = nn.BatchNorm1d(width)
        elif kind == "conv":
            self.conv = nn.Conv1d(1, 2, 3, padding=1)
        elif kind == "bare":
            self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.norm(self.linear(x)))
        if self.kind == "twice":
            y = torch.tanh(self.linear(y))
        elif self.kind == "conv":
            y = self.conv(y.unsqueeze(1)).mean(1)
        elif self.kind == "bare":
            y = y * self.scale
        return x + y


class Model(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        torch.manual_seed(5)
        width = job.widths[0]
        self.first = nn.Linear(IN, width)
        self.blocks = nn.ModuleList(Block(each, job.kind) for each in job.widths)
        self.last = nn.Linear(width, 3)
        if job.unused:
            self.never = nn.Linear(5, 5)
        if job.tied and len(self.blocks) > 1:
            self.blocks[-1].linear.weight = self.blocks[0].linear.weight
        self.checkpointing = job.checkpointing
        self.to(DTYPES[job.dtype])
        self.start: Any = self._start
        if job.compiled == "method":
            self.start = torch.compile(self._start, backend="eager")

    def _start(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)

    def forward(self, x: torch.Tensor, keep: list[bool]) -> torch.Tensor:
        x = self.start(x)
        for block, kept in zip(self.blocks, keep, strict=True):
            if not kept:
                continue
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
            else:
                x = block(x)
        return self.last(x)


class Training:
    """The job on one rank, or, with `ranks`, of all of these in one process."""

    def __init__(self, job: Job, ranks: list[int], size: int, alone: bool) -> None:
        self.job, self.ranks, self.size, self.alone = job, ranks, size, alone
        self.module = Model(job)
        module: Any = self.module
        if job.compiled == "module":
            module = torch.compile(module, backend="eager")
        self.model: Any = module
        if not alone:
            self.model = poseidon.DistributedDataParallel(
                module, scheme=job.scheme, wire=job.wire, static_graph=job.static_graph and not job.drop
            )
        self._add_hooks()
        self.optimizer: Any = OPTIMIZERS[job.optimizer](self.module.parameters())
        if job.update and not alone:
            self.optimizer = poseidon.DistributedOptimizer(self.optimizer, self.model, update=job.update)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if job.amp == "scaler" else None
        dtype = DTYPES[job.dtype]
        self.batch, self.out_grad = torch.empty(ROWS, IN, dtype=dtype), torch.empty(ROWS, 3, dtype=dtype)
        self.seen: list[float] = []

    def _add_hooks(self) -> None:
        block = self.module.blocks[-1]
        if self.job.hook == "tensor":
            block.linear.weight.register_hook(lambda grad: grad * 0.5)
        elif self.job.hook == "module":
            block.register_full_backward_hook(lambda *_: None)

    def inputs(self, step: int, micro: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
        values = torch.randn(ROWS, IN, generator=generator).to(self.batch.dtype)
        return self.batch.copy_(values) if self.job.reused and not self.alone else values

    def keep(self, step: int, rank: int) -> list[bool]:
        count = len(self.job.widths)
        return [not self.job.drop or (step + index + rank) % 3 != 0 for index in range(count)]

    def backward(self, step: int, micro: int, rank: int) -> None:
        job = self.job
        context = torch.autocast("cpu", dtype=torch.bfloat16) if job.amp else nullcontext()
        with context:
            output = self.model(self.inputs(step, micro, rank), self.keep(step, rank))
        share = 1 / self.size if self.alone else 1.0
        if job.given:
            self.out_grad.fill_(0.1 * share).mul_(1 + rank)
            output.backward(self.out_grad.to(output.dtype) if job.amp else self.out_grad)
            self.out_grad.fill_(1e3)
        else:
            loss = output.float().square().mean() * share
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if job.reused and not self.alone:
            self.batch.fill_(1e3)

    def step(self, step: int) -> None:
        job = self.job
        if step == job.frozen:
            self.module.blocks[0].requires_grad_(False)
        self.optimizer.zero_grad(set_to_none=job.set_to_none)
        for micro in range(job.accumulation):
            last = micro == job.accumulation - 1
            local = job.no_sync and not last and not self.alone
            buffers = {name: value.clone() for name, value in self.module.named_buffers()}
            for rank in reversed(self.ranks):  # the buffers of rank 0 count
                for name, value in self.module.named_buffers():
                    value.copy_(buffers[name])
                with self.model.no_sync() if local else nullcontext():
                    self.backward(step, micro, rank)
        if self.scaler is not None and not job.given:
            self.scaler.unscale_(self.optimizer)
        if job.clip:
            clip_grad_norm_(self.module.parameters(), 0.5)
        if self.scaler is None or job.given:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.between(step)

    def between(self, step: int) -> None:
        what = self.job.between
        self._do(what, step)
        if what in ("edit", "reload") and self.job.update == "server" and not self.alone:
            self.optimizer.push_parameters()

    def _do(self, what: str, step: int) -> None:
        if what.startswith("evaluate"):
            with torch.no_grad():
                model = self.module if "past" in what else self.model
                model.eval()
                model(torch.ones(2, IN, dtype=self.batch.dtype), [True] * len(self.job.widths))
                model.train()
        elif what == "look":
            self.seen.append(sum(param.float().sum().item() for param in self.module.parameters()))
        elif what == "edit":
            with torch.no_grad():
                list(self.module.parameters())[step % 3].mul_(0.9)
        elif what == "reload":
            self.module.load_state_dict(self.module.state_dict())
        elif what == "state":
            self.optimizer.load_state_dict(self.optimizer.state_dict())
        elif what == "grads":
            for param in self.module.parameters():
                if param.grad is not None:
                    param.grad.sum().item()


def tolerance(job: Job) -> float:
    """How far from one process's parameters those of the workers may be."""
    limits = [2e-3]
    limits += [0.1] * (job.dtype == "bfloat16") + [0.05] * bool(job.amp)
    limits += [{"fp32": 0.0, "bf16": 0.03, "fp16": 0.01, "int8": 0.05}[job.wire]]
    return max(limits)


def run_job(seed: int) -> str:
    """Collective: trains the job of a seed, and compares it with one process. Returns a digest, equal on all ranks."""
    job, size, rank = make(seed), poseidon.world_size(), poseidon.rank()
    torch.compiler.reset() if job.compiled else None
    mine, reference = Training(job, [rank], size, alone=False), Training(job, list(range(size)), size, alone=True)
    for step in range(job.steps):
        mine.step(step)
        reference.step(step)
    limit = tolerance(job)
    wanted = dict(reference.module.named_parameters())
    for name, param in mine.module.named_parameters():
        torch.testing.assert_close(
            param.detach().double(),
            wanted[name].detach().double(),
            rtol=limit,
            atol=limit,
            msg=lambda text, n=name: f"{n}: {text}",
        )
    return digest(mine.module.parameters())
