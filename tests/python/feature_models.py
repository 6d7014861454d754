"""The model, batches and optimizers of the jobs of feature_training.py, and the same training in one process."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from poseidon.torch.tensors.shard import part_of

MOST = 3  # ranks
EVERY = 2  # steps from one average of LocalSGD to the next
CHANGES_AT = 2  # the step in which another optimizer takes over
SMOOTHING = 0.5
MAX_NORM = 0.3

Settings = Mapping[str, Any]


def size_of(settings: Settings) -> int:
    """How many ranks the job has: 2, or more where a feature needs them."""
    asks = ("init.stragglers", "own.aggregator", "part", "by_rank.machine", "by_rank.rack")
    return MOST if any(name in settings for name in asks) else 2


def step_count(settings: Settings) -> int:
    """How many steps the job makes. Servers drop nobody in the first ten."""
    return 16 if drops(settings) else 6


def drops(settings: Settings) -> bool:
    """Whether the steps end without a rank that is late."""
    return settings.get("init.stragglers") == "drop" and not settings.get("in time")


def has_batch(settings: Settings, step: int, rank: int) -> bool:
    """Whether the rank has data for this step."""
    return not settings.get("join") or step < step_count(settings) - rank


def row_count(settings: Settings, rank: int) -> int:
    """The rows of a batch. All ranks' rows together are not more than the rank of powersgd.

    BatchNorm divides by what may be nearly 0 with two rows.
    """
    least = 4 if settings.get("norm") else 2
    return least + rank if settings.get("weights") else least


class Net(nn.Module):
    """Layers that travel alone, as matrices, and small parameters that travel in a group."""

    def __init__(self, settings: Settings, number: int) -> None:
        super().__init__()
        torch.manual_seed(5 + number)
        table, unused = settings.get("table"), settings.get("unused")
        self.table = nn.Embedding(60, 48, sparse=table == "sparse") if table else None
        self.first = nn.Linear(48, 64)
        self.norm = nn.BatchNorm1d(64) if settings.get("norm") else nn.Identity()
        self.middle = nn.Linear(64, 64)
        self.last = nn.Linear(64, 4)
        self.rare = nn.Linear(64, 64) if unused else None
        self.never = nn.Linear(5, 5) if unused else None
        self.recomputes = bool(settings.get("recomputes"))
        self.to(getattr(torch, settings.get("dtype", "float32")))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.middle(x))

    def forward(self, x: torch.Tensor, tokens: torch.Tensor, uses_rare: bool) -> torch.Tensor:
        if self.table is not None:
            x = x + self.table(tokens)
        x = torch.tanh(self.norm(self.first(x)))
        recomputes = self.recomputes and torch.is_grad_enabled()
        x = x + (checkpoint(self.body, x, use_reentrant=False) if recomputes else self.body(x))
        if self.rare is not None and uses_rare:
            x = x + torch.tanh(self.rare(x))
        return self.last(x)


def make_optimizer(settings: Settings, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of torch."""
    kind = settings.get("optimizer", "sgd")
    if kind == "adamw":
        return torch.optim.AdamW(params, lr=0.01, eps=1e-2)
    if kind == "lbfgs":
        return torch.optim.LBFGS(params, lr=0.05, max_iter=2, tolerance_grad=0, tolerance_change=0)
    return torch.optim.SGD(params, lr=0.05, momentum=0.5)


class Training:
    """One model and its optimizers. `model` is what forward calls, which is `module`, or a wrapper around it."""

    def __init__(self, settings: Settings, number: int) -> None:
        self.settings, self.number = settings, number
        self.module = Net(settings, number)
        self.model: Any = self.module
        self.start = [tensor.detach().clone() for tensor in self.module.parameters()]
        self.optimizers: list[Any] = []
        scales = settings.get("scaler")
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if scales else None

    def add_hooks(self) -> None:
        """Those on parameters that the program has."""
        if self.settings.get("tensor hook"):
            self.module.middle.weight.register_hook(lambda gradient: gradient * SMOOTHING)
        if self.settings.get("accumulate hook"):
            self.module.first.weight.register_post_accumulate_grad_hook(_smooth)

    def batch(self, step: int, micro: int, rank: int) -> tuple[Any, ...]:
        """Inputs and targets. Some ranks do not use a layer in some steps."""
        generator = torch.Generator().manual_seed(1000 * step + 100 * micro + 10 * self.number + rank)
        rows = row_count(self.settings, rank)
        dtype = self.module.first.weight.dtype
        inputs = torch.randn(rows, 48, generator=generator).to(dtype)
        tokens = torch.randint(60, (rows,), generator=generator)
        target = torch.randn(rows, 4, generator=generator)
        return inputs, tokens, (step + rank) % 3 != 0, target.double() if dtype == torch.float64 else target

    def loss(self, step: int, micro: int, rank: int) -> torch.Tensor:
        *inputs, target = self.batch(step, micro, rank)
        with torch.autocast("cpu", dtype=torch.bfloat16) if self.settings.get("autocast") else nullcontext():
            output = self.model(*inputs)
        return (output.to(target.dtype) - target).square().mean()

    def backward(self, step: int, rank: int) -> float:
        """All backward passes of a rank's step."""
        count, total = (2 if self.settings.get("accumulates") else 1), 0.0
        for micro in range(count):
            with nullcontext() if micro == count - 1 else self.without_exchange():
                loss = self.loss(step, micro, rank) / count
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            total += loss.item()
        return total

    def without_exchange(self) -> AbstractContextManager[Any]:
        """What is around the backward passes that only accumulate."""
        return nullcontext()

    def gradients(self, step: int) -> float:
        """Puts the gradients of a step in place."""
        raise NotImplementedError

    def closure(self, step: int) -> float:
        with torch.enable_grad():
            loss = self.gradients(step)
        self.clip()
        return loss

    def clip(self) -> None:
        """By the program; torch has no norm of sparse gradients."""
        if self.settings.get("clips"):
            params = [param for name, param in self.module.named_parameters() if not name.startswith("table.")]
            torch.nn.utils.clip_grad_norm_(params, MAX_NORM)

    @property
    def clips(self) -> bool:
        """Whether `clip` does something."""
        return bool(self.settings.get("clips"))

    def prepare(self, step: int) -> None:
        """What comes before the forward pass of a step."""
        if self.settings.get("second") and step == CHANGES_AT:
            self.change_optimizer()

    def step(self, step: int) -> None:
        self.prepare(step)
        more: dict[str, Any] = {}
        if self.settings.get("closure"):
            more["closure"] = lambda: self.closure(step)
        else:
            self.gradients(step)
            if self.scaler is not None and self.clips:
                for optimizer in self.optimizers:
                    self.scaler.unscale_(optimizer)
            self.clip()
        for optimizer in self.optimizers:
            if self.scaler is None:
                optimizer.step(**more)
            else:
                self.scaler.step(optimizer, **more)
        if self.scaler is not None:
            self.scaler.update()

    def change_optimizer(self) -> None:
        self.optimizers = [make_optimizer(self.settings, list(self.module.parameters()))]


def _smooth(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(SMOOTHING)


class Alone(Training):
    """The training of some ranks in this process: their gradients are made one after the other, and combined."""

    def __init__(self, settings: Settings, number: int, ranks: Sequence[int]) -> None:
        super().__init__(settings, number)
        self.ranks = ranks
        self._norm: torch.Tensor | None = None  # of the gradients of the step before
        self.add_hooks()
        self.change_optimizer()

    @property
    def clips(self) -> bool:
        return super().clips or "own.max_norm" in self.settings

    def clip(self) -> None:
        super().clip()
        if "own.max_norm" not in self.settings:
            return
        params = [param for param in self.module.parameters() if param.grad is not None]
        norm = torch.nn.utils.get_total_norm([param.grad for param in params])
        used = norm if self._norm is None or self.settings["own.clip"] == "gathered" else self._norm
        torch.nn.utils.clip_grads_with_norm_(params, self.settings["own.max_norm"], used)
        self._norm = norm

    def change_optimizer(self) -> None:
        super().change_optimizer()
        self._norm = None

    def gradients(self, step: int) -> float:
        buffers = [buffer.clone() for buffer in self.module.buffers()]
        found: dict[int, list[torch.Tensor | None]] = {}
        loss = 0.0
        for rank in reversed(self.ranks):  # rank 0's buffers count
            if not has_batch(self.settings, step, rank):
                continue
            for buffer, value in zip(self.module.buffers(), buffers, strict=True):
                buffer.copy_(value)
            self.module.zero_grad()
            loss += self.backward(step, rank) / len(self.ranks)
            found[rank] = [param.grad for param in self.module.parameters()]
        for index, param in enumerate(self.module.parameters()):
            param.grad = self._combined({rank: gradients[index] for rank, gradients in found.items()})
        return loss

    def _combined(self, parts: Mapping[int, torch.Tensor | None]) -> torch.Tensor | None:
        given = {rank: part for rank, part in parts.items() if part is not None}
        if not given:
            return None
        if self.settings.get("own.aggregator") == "median":
            zeros = torch.zeros_like(next(iter(given.values())))
            return torch.stack([given.get(rank, zeros) for rank in self.ranks]).quantile(0.5, dim=0)
        weights = {rank: row_count(self.settings, rank) for rank in self.ranks}
        total = functools.reduce(operator.add, [given[rank] * weights[rank] for rank in sorted(given)])
        return total / sum(weights.values())


class Averaged:
    """The training of ranks that train alone, and average their parameters."""

    def __init__(self, settings: Settings, number: int, ranks: Sequence[int]) -> None:
        self.settings = settings
        self.ranks = [Alone(settings, number, [rank]) for rank in ranks]
        self.module, self.start = self.ranks[0].module, self.ranks[0].start
        self._begin()

    def _begin(self) -> None:
        self._held = [nn.Parameter(param.detach().clone()) for param in self.module.parameters()]
        self._outer: torch.optim.Optimizer | None = None
        if self.settings["trainer"] == ("outer",):
            self._outer = torch.optim.SGD(self._held, lr=0.7, momentum=0.9, nesterov=True)

    @torch.no_grad()
    def step(self, step: int) -> None:
        if self.settings.get("second") and step == CHANGES_AT:
            self._begin()
        with torch.enable_grad():
            for one in self.ranks:
                one.step(step)
        if (step + 1) % EVERY:
            return
        weights = [row_count(self.settings, rank) for one in self.ranks for rank in one.ranks]
        for held, *params in zip(self._held, *(one.module.parameters() for one in self.ranks), strict=True):
            pairs = zip(params, weights, strict=True)
            mean = sum(param.double() * weight for param, weight in pairs) / sum(weights)
            held.grad = (held - mean).to(held.dtype)
        if self._outer is not None:
            self._outer.step()
        for held, *params in zip(self._held, *(one.module.parameters() for one in self.ranks), strict=True):
            if self._outer is None:
                held.sub_(held.grad)
            for param in params:
                param.copy_(held)
        for buffers in zip(*(one.module.buffers() for one in self.ranks), strict=True):
            for buffer in buffers[1:]:
                buffer.copy_(buffers[0])


def reference(settings: Settings, number: int, averages: bool) -> Alone | Averaged:
    """The training of model `number` in one process, to its end."""
    ranks = [0, 2] if settings.get("part") else list(range(size_of(settings)))
    made: Alone | Averaged = (Averaged if averages else Alone)(settings, number, ranks)
    for step in range(step_count(settings)):
        made.step(step)
    return made


def compared(settings: Settings, module: nn.Module) -> Iterator[torch.Tensor]:
    """What is compared with one process: parameters, and the buffers where these are rank 0's."""
    yield from map(part_of, module.parameters())
    own = {"join", "init.checkpoint_every", "init.stragglers"} & settings.keys()
    if settings.get("norm") and not own and settings.get("wrap.broadcast_buffers", True):
        yield from module.buffers()
