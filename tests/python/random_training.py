"""Random training jobs: what a seed stands for, and its training on several workers beside one process that does all.

`run_job(seed)` runs on every rank and raises where the two differ. `make(seed)` is what the job is.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import poseidon.torch as poseidon
from random_training_models import DTYPES, IN, OPTIMIZERS, OWN_CLASSES, Model
from torch_cases import digest

ROWS = 4  # of one micro-batch on one rank
KNOWN = [name for name in OPTIMIZERS if name not in (*OWN_CLASSES, "lbfgs")]


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
    changes: str  # what changes in mid-run
    at: int  # in this step
    passes: str  # forward and backward passes of a micro-batch
    closure: bool
    scales_grads: bool  # the program changes gradients before step()


def make(seed: int) -> Job:
    """The job of a seed."""
    draw = random.Random(seed)

    def often(value: Any, *others: Any, share: float = 0.6) -> Any:
        return value if draw.random() < share else draw.choice(others)

    blocks = draw.randint(1, 4)
    width = draw.choice([4, 16, 33])
    optimizer = draw.choice(KNOWN)
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
    job = Job(
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
        changes=often("", "unfreeze", "wrap again", "tie", "untie", "group", "optimizer", share=0.5),
        at=draw.randint(1, 2),
        passes=often("one", "two forwards", "retained", "penalty", share=0.7),
        closure=draw.random() < 0.15,
        scales_grads=draw.random() < 0.15,
    )
    return _possible(replace(job, **_more(draw, job)))


def _more(draw: random.Random, job: Job) -> dict[str, Any]:
    """What seldom replaces something that is drawn above."""
    found: dict[str, Any] = {}
    if job.update != "server" and draw.random() < 0.25:
        found["optimizer"] = draw.choice([*OWN_CLASSES, "lbfgs"])
    if job.kind != "batchnorm" and not job.compiled and draw.random() < 0.1:
        found["checkpointing"] = "own"
    elif not (job.checkpointing or job.kind == "batchnorm" or job.drop) and draw.random() < 0.06:
        found["compiled"] = draw.choice(["forward", "blocks"])
    return found


def _possible(job: Job) -> Job:
    """The job without what its pages refuse, and without what is not the same arithmetic in one process."""
    out: dict[str, Any] = {}
    if job.update == "server":  # gradients are used in backward, and groups are fixed
        out |= {"scales_grads": False, "changes": "" if job.changes in ("tie", "group") else job.changes}
        out |= {"passes": "one" if job.passes == "retained" else job.passes}
        if job.changes == "untie" and job.frozen >= 0:
            out["set_to_none"] = True  # a gradient that is left at a frozen parameter is an error
    if job.optimizer == "lbfgs":  # gradients and steps in its closure
        out |= {
            "update": "",
            "amp": "",
            "changes": "",
            "frozen": -1,
            "closure": True,
            "wire": "fp32",
            "dtype": "float64",
        }
        out |= {"unused": False, "drop": False, "scales_grads": False, "clip": False}
    elif job.amp == "scaler" or job.given:
        out["closure"] = False
    if job.given or job.amp or job.checkpointing or job.compiled:
        out["passes"] = "one"
    nested = job.checkpointing in ("reentrant", "own")  # a tied parameter's gradient comes in several passes
    several = job.accumulation > 1 or job.passes != "one" or job.optimizer == "lbfgs" or nested
    if job.hook == "accumulated" and several:
        out["hook"] = ""  # it would see the sum of other micro-batches
    if job.changes in ("tie", "untie") and len(job.widths) == 1:
        out["changes"] = ""
    if job.checkpointing == "own":
        out["amp"] = ""  # it does not keep the type of numbers
    if job.changes in ("unfreeze", "wrap again") and (job.tied or len(job.widths) == 1):
        out["hook"] = ""  # a frozen parameter takes none
    if job.changes == "untie":
        out["tied"] = True
    if job.changes == "tie":
        out["static_graph"] = False  # the program has promised that its graph stays
    return replace(job, **out)


def options(seed: int) -> dict[str, Any]:
    """What init() gets. Few different ones, since each costs the workers a new meeting."""
    return random.Random(seed // 25).choice(
        [
            {},
            {"small_bytes": 0},
            {"small_bytes": 1 << 15},
            {"chunk_bytes": 64},
            {"priority_classes": 1},
            {"transport": "tcp", "coding": "on"},
        ]
    )


def _halve(param: torch.Tensor) -> None:
    if param.grad is not None:
        param.grad.mul_(0.5)


class Training:
    """The job on one rank, or, with `ranks`, of all of these in one process."""

    def __init__(self, job: Job, ranks: list[int], size: int, alone: bool) -> None:
        self.job, self.ranks, self.size, self.alone = job, ranks, size, alone
        self.module = Model(job)
        if job.changes == "wrap again":
            self.module.blocks[0].requires_grad_(False)
        self.model: Any = None
        self._wrap()
        self._add_hooks()
        self.optimizer: Any = None
        self._make_optimizer(job.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if job.amp == "scaler" else None
        dtype = DTYPES[job.dtype]
        self.batch, self.out_grad = torch.empty(ROWS, IN, dtype=dtype), torch.empty(ROWS, 3, dtype=dtype)
        self.seen: list[float] = []

    def _wrap(self) -> None:
        job, module = self.job, self.module
        self.model = torch.compile(module, backend="eager") if job.compiled == "module" else module
        if not self.alone:
            static = job.static_graph and not job.drop
            self.model = poseidon.DistributedDataParallel(
                self.model, scheme=job.scheme, wire=job.wire, static_graph=static
            )

    def _make_optimizer(self, kind: str) -> None:
        job, params = self.job, list(self.module.parameters())
        later = {id(param) for param in self.module.last.parameters()} if job.changes == "group" else set()
        self.optimizer = OPTIMIZERS[kind]([param for param in params if id(param) not in later])
        if job.update and not self.alone:
            own = {"per_parameter": True} if kind == "own" and job.update == "worker" else {}
            self.optimizer = poseidon.DistributedOptimizer(self.optimizer, self.model, update=job.update, **own)

    def _add_hooks(self) -> None:
        block = self.module.blocks[-1]
        self.hooked = block.linear.weight  # which may leave the block
        if self.job.hook == "tensor":
            self.hooked.register_hook(lambda grad: grad * 0.5)
        elif self.job.hook == "accumulated" and not self.alone:  # alone it would see the sum of the ranks
            self.hooked.register_post_accumulate_grad_hook(_halve)
        elif self.job.hook == "module":
            block.register_full_backward_hook(lambda *_: None)

    def inputs(self, step: int, micro: int, rank: int, again: bool = False) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
        values = torch.randn(ROWS, IN, generator=generator).to(self.batch.dtype)
        return self.batch.copy_(values) if self.job.reused and not (self.alone or again) else values

    def keep(self, step: int, rank: int) -> list[bool]:
        count = len(self.job.widths)
        return [not self.job.drop or (step + index + rank) % 3 != 0 for index in range(count)]

    def forward(self, step: int, micro: int, rank: int, again: bool = False) -> torch.Tensor:
        context = torch.autocast("cpu", dtype=torch.bfloat16) if self.job.amp else nullcontext()
        with context:
            output: torch.Tensor = self.model(self.inputs(step, micro + 5 * again, rank, again), self.keep(step, rank))
        return output

    def backward(self, step: int, micro: int, rank: int, local: bool) -> None:
        """All backward passes of a micro-batch. `local`: without exchange."""
        job, share = self.job, 1 / self.size if self.alone else 1.0
        with self.model.no_sync() if local else nullcontext():
            output = self.forward(step, micro, rank)
            loss = output.float().square().mean() * share
            if job.passes == "two forwards":
                loss = loss + self.forward(step, micro, rank, again=True).float().square().mean() * share
            elif job.passes == "penalty":
                loss = loss + self._penalty(step, micro, rank) * share
        if job.passes == "retained":
            with nullcontext() if self.alone else self.model.no_sync():
                (0.5 * loss).backward(retain_graph=True)
        with self.model.no_sync() if local else nullcontext():
            if job.given:
                self.out_grad.fill_(0.1 * share).mul_(1 + rank)
                output.backward(self.out_grad.to(output.dtype) if job.amp else self.out_grad)
                self.out_grad.fill_(1e3)
            else:
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if job.reused and not self.alone:
            self.batch.fill_(1e3)

    def _penalty(self, step: int, micro: int, rank: int) -> torch.Tensor:
        """Of the gradient by the inputs: backward goes through a backward pass."""
        inputs = self.inputs(step, micro + 5, rank, again=True).requires_grad_()
        output = self.model(inputs, self.keep(step, rank))
        (slope,) = torch.autograd.grad(output.float().sum(), inputs, create_graph=True)
        return slope.float().square().mean()

    def all_backward(self, step: int) -> float:
        """What one step exchanges. Alone, the loss of all ranks."""
        job = self.job
        self.optimizer.zero_grad(set_to_none=job.set_to_none)
        for micro in range(job.accumulation):
            last = micro == job.accumulation - 1
            buffers = {name: value.clone() for name, value in self.module.named_buffers()}
            for rank in reversed(self.ranks):  # the buffers of rank 0 count
                for name, value in self.module.named_buffers():
                    value.copy_(buffers[name])
                self.backward(step, micro, rank, local=job.no_sync and not last and not self.alone)
        if job.hook == "accumulated" and self.alone:
            _halve(self.hooked)
        return 0.0

    def step(self, step: int) -> None:
        job = self.job
        if step == job.frozen:
            self.module.blocks[0].requires_grad_(False)
        if step == 0 and job.changes == "unfreeze":
            self.module.blocks[0].requires_grad_(False)
        if step == job.at:
            self.change()
        if job.closure:
            with torch.enable_grad():
                self.optimizer.step(lambda: self.all_backward(step))
            self.between(step)
            return
        self.all_backward(step)
        scaler = None if job.given else self.scaler
        if scaler is not None:
            scaler.unscale_(self.optimizer)
        if job.scales_grads:
            for param in self.module.parameters():
                _halve(param)
        if job.clip:
            clip_grad_norm_(self.module.parameters(), 0.5)
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()
        self.between(step)

    def _begin_again(self, kind: str) -> None:
        """With another wrapper, for what the one before does not know."""
        if self.job.at == 1:  # otherwise it lives until the later one is there
            self.optimizer = None
        self._wrap()
        self._make_optimizer(kind)

    def change(self) -> None:
        what, blocks = self.job.changes, self.module.blocks
        if what == "unfreeze":
            blocks[0].requires_grad_(True)
        elif what == "wrap again":
            blocks[0].requires_grad_(True)
            self._begin_again("adam")
        elif what == "tie":
            blocks[-1].linear.weight = blocks[0].linear.weight
        elif what == "untie":
            blocks[-1].linear.weight = nn.Parameter(blocks[0].linear.weight.detach().clone())
            self._begin_again("momentum")
        elif what == "group":
            self.optimizer.add_param_group({"params": list(self.module.last.parameters()), "lr": 0.02})
        elif what == "optimizer":
            self._make_optimizer("adam")

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
    limits = [1e-6 if job.dtype == "float64" else 5e-4]
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
