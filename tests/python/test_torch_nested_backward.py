"""Backward passes inside others: one exchange for the outermost, of the same layers on every rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import poseidon.torch as poseidon
import workers
from poseidon.torch.exchange.runs import caller_of_backward
from torch_cases import all_equal, digest, own_rows

STEPS = 4
BLOCKS = 4

Loss = Callable[[Any, torch.Tensor, list[bool]], torch.Tensor]


class Residual(nn.Module):
    """Every parameter is inside a re-entrant checkpoint, as in fine-tuning with adapters; ranks may leave blocks out.

    `depth` checkpoints are around each block.
    """

    def __init__(self, depth: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(24, 24) for _ in range(BLOCKS))
        self.depth = depth

    def forward(self, x: torch.Tensor, keep: list[bool]) -> torch.Tensor:
        x = x.requires_grad_()
        for block, kept in zip(self.blocks, keep, strict=True):
            if kept:
                x = x + self._around(block, self.depth, torch.tanh(x))
        return x

    def _around(self, block: nn.Module, depth: int, x: torch.Tensor) -> torch.Tensor:
        if not depth:
            return block(x)
        return checkpoint(lambda value: self._around(block, depth - 1, value), x, use_reentrant=True)


class Shared(Residual):
    """One block, in as many checkpoints, so that several inner passes give it gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.blocks[0]] * BLOCKS)


class Opaque:
    """An output in which nobody finds the tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Hidden(Residual):
    def forward(self, x: torch.Tensor, keep: list[bool]) -> Any:
        return Opaque(super().forward(x, keep))


class _Inner(torch.autograd.Function):
    """Its backward runs that of a loss made in its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: nn.Module, keep: list[bool]) -> torch.Tensor:
        with torch.enable_grad():
            ctx.leaf = x.detach().requires_grad_()
            ctx.loss = Residual.forward(module, ctx.leaf * 1, keep).square().mean()
        return ctx.loss.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.loss.backward(grad)
        return ctx.leaf.grad, None, None


class OwnFunction(Residual):
    def __init__(self) -> None:
        super().__init__(0)

    def forward(self, x: torch.Tensor, keep: list[bool]) -> torch.Tensor:
        return _Inner.apply(x.requires_grad_(), self, keep)


def plain_loss(model: Any, x: torch.Tensor, keep: list[bool]) -> torch.Tensor:
    output = model(x, keep)
    return (output.tensor if isinstance(output, Opaque) else output).square().mean()


def around_wrapper(model: Any, x: torch.Tensor, keep: list[bool]) -> torch.Tensor:
    """The whole model inside a checkpoint: the wrapper's forward pass runs in a backward pass, too."""
    return checkpoint(lambda value: model(value, keep), x.requires_grad_(), use_reentrant=True).square().mean()


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 24, generator=torch.Generator().manual_seed(step))


def kept_blocks(step: int, rank: int, drop: bool) -> list[bool]:
    """Rank 0 leaves another block out in each step, and in one all but one."""
    if not drop or rank:
        return [True] * BLOCKS
    return [index == 2 if step == 2 else (step + index) % BLOCKS != 0 for index in range(BLOCKS)]


def reference(make: Callable[[], nn.Module], loss: Loss, drop: bool) -> nn.Module:
    module, size = make(), poseidon.world_size()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(size):
            (loss(module, batch(step).chunk(size)[rank].clone(), kept_blocks(step, rank, drop)) / size).backward()
        optimizer.step()
    return module


def trained(make: Callable[[], nn.Module], loss: Loss, drop: bool, update: str, scheme: str) -> str:
    model = poseidon.DistributedDataParallel(make(), scheme=scheme)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if update:
        optimizer = poseidon.DistributedOptimizer(optimizer, model, update=update)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, own_rows(batch(step)).clone(), kept_blocks(step, poseidon.rank(), drop)).backward()
        optimizer.step()
    torch.testing.assert_close(
        [param.detach() for param in model.parameters()],
        [param.detach() for param in reference(make, loss, drop).parameters()],
    )
    assert model.trained_model().step_count == STEPS
    return digest(model.parameters())


def all_kinds() -> list[str]:
    kinds: list[tuple[Any, Loss]] = [
        (Residual, plain_loss),
        (lambda: Residual(2), plain_loss),
        (Shared, plain_loss),
        (Hidden, plain_loss),
        (OwnFunction, lambda model, x, keep: model(x, keep)),
        (Residual, around_wrapper),
    ]
    results = []
    for make, loss in kinds:
        for drop in (False, True):
            if drop and make is Shared:
                continue
            ways = [("", "sfb"), ("worker", "auto"), ("server", "auto")]
            results += [trained(make, loss, drop, *way) for way in ways]
    return results


def test_one_exchange_for_the_outermost_backward() -> None:
    assert all_equal(workers.run(2, all_kinds))


class _FailingOnce(torch.autograd.Function):
    """Its backward fails once the inner backward pass of the block behind it is over."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError


def outer_fails() -> str:
    poseidon.init()
    model = poseidon.DistributedDataParallel(nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24)))

    def forward(make_output: Any) -> Any:
        hidden = _FailingOnce.apply(batch(0).requires_grad_())
        return make_output(checkpoint(model.module[1], hidden, use_reentrant=True))

    try:
        model.module.forward = lambda: forward(Opaque)
        model().tensor.sum().backward()
    except ZeroDivisionError:
        pass
    try:
        model()
    except poseidon.PoseidonError as error:
        return str(error)
    return "nothing was raised"


def test_failure_after_an_inner_backward_is_known_in_the_next_forward() -> None:
    for answer in workers.run_fresh(2, outer_fails):  # one rank may hear of it from the other
        assert "an earlier backward pass failed" in str(answer) + repr(answer)


def callers_of_backward() -> list[tuple[int, int, int]]:
    """The thread of a hook, what is its caller, and this thread: in a backward alone, and in one inside many others."""
    found: list[tuple[int, int, int]] = []
    own = threading.get_ident()

    def run_backward(depth: int) -> None:
        leaf = torch.zeros((), requires_grad=True)
        if depth:
            leaf.register_hook(lambda _: run_backward(depth - 1))
        else:
            leaf.register_hook(lambda _: found.append((threading.get_ident(), caller_of_backward(), own)))
        with torch.enable_grad():
            (leaf * 1).backward()

    run_backward(0)
    run_backward(100)  # of which the innermost ones run in the first of that pool's threads
    return found


def test_the_caller_of_backward_is_known_in_a_thread_of_autograds() -> None:
    """A backward inside many others runs in a thread of autograd's pool, as that on a device does in another one.

    Processes that are forked after that cannot run backward: so it has a process of its own.
    """
    for (here, nobody, own), (there, caller, _) in workers.run_fresh(1, callers_of_backward):
        assert (here, nobody) == (own, 0)
        assert there != own
        assert caller == own
