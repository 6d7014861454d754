"""Models and optimizers of random training jobs (random_training.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from optimizer_kinds import ClipsTotal, Momentum, SkipsBad, SlowWeights, Smooth

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
    "own": lambda params: Smooth(params, lr=0.2),
    "subclass": Momentum,
    "skips": SkipsBad,
    "clips": lambda params: ClipsTotal(params, 0.3),
    "slow": SlowWeights,
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.05, max_iter=2, tolerance_grad=0, tolerance_change=0),
}
OWN_CLASSES = ("own", "subclass", "skips", "clips", "slow")  # which torch.optim does not have


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


class Recomputed(torch.autograd.Function):
    """A checkpoint of the program's own, which calls backward in backward."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        ctx.block, ctx.x = block, x.detach()
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x = ctx.x.requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.block(x), grad)
        return None, x.grad, None


class Model(nn.Module):
    def __init__(self, job: Any) -> None:
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
        elif job.compiled == "forward":
            self.forward = torch.compile(self.forward, backend="eager")  # type: ignore[method-assign]
        elif job.compiled == "blocks":
            for block in self.blocks:
                block.compile(backend="eager")

    def _start(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)

    def forward(self, x: torch.Tensor, keep: list[bool]) -> torch.Tensor:
        x = self.start(x)
        for block, kept in zip(self.blocks, keep, strict=True):
            if not kept:
                continue
            if self.checkpointing == "own":
                x = Recomputed.apply(block, x, x.sum())
            elif self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
            else:
                x = block(x)
        return self.last(x)
