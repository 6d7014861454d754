"""What overlaps: a forward pass runs while later layers' gradients are still on their way."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

import poseidon.torch as poseidon
import workers
from overlap_cases import wrapped
from poseidon.torch.optimizer.worker_update import PendingStep
from poseidon.torch.process.context import context
from waiting import compute_for, wait_until

LATE_S = 0.4


def momentum(params: Any) -> Optimizer:
    return SGD(params, lr=0.05, momentum=0.9)


class SleepInBackward(torch.autograd.Function):
    """Passes on what it gets, in backward after a while."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        compute_for(ctx.seconds)
        return grad, None


class Two(nn.Module):
    """Uses `first`, then `late`; on rank 1 the other way round, and there backward takes long between the two."""

    def __init__(self, sleep_s: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(48, 48, bias=False)
        self.late = nn.Linear(48, 48, bias=False)
        self.sleep_s = sleep_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if poseidon.rank() == 0:
            return self.late(torch.tanh(self.first(x)))
        return self.first(SleepInBackward.apply(self.late(x), self.sleep_s))


def first_runs_before_late_arrives(update: str) -> list[float]:
    """On rank 0: when the second forward pass left `first` before `late` had arrived, in s."""
    model, optimizer = wrapped(True, momentum, Two(LATE_S), scheme="ps", update=update)
    model.record()
    left: list[int] = []
    model.module.first.register_forward_hook(lambda *_: left.append(time.monotonic_ns()))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 48, requires_grad=True)).square().mean().backward()
        optimizer.step()
    arrivals = [next(layer for layer in step.layers if layer.name == "late.weight") for step in model.recorded_steps()]
    return [(late.completed_ns - passed) / 1e9 for late, passed in zip(arrivals, left[1:], strict=False)]


@pytest.mark.parametrize("update", ["worker", "server"])
def test_forward_starts_before_the_last_gradient_is_there(update: str) -> None:
    leads = workers.run(2, first_runs_before_late_arrives, update)[0]
    assert len(leads) == 2
    assert min(leads) > LATE_S / 2, leads


def updates_while_waiting() -> list[list[str]]:
    """On rank 0: the order of updates when the first layer's gradient comes last."""
    model, optimizer = wrapped(True, momentum, Two(0.0), scheme="ps")
    names = {entry.param: entry.name for entry in model.synced_parameters}
    client, late = context().client, next(one.layer for one in model.synced_parameters if one.name == "late.weight")
    updates: list[list[str]] = []
    apply = PendingStep.apply

    def noted(self: PendingStep, jobs: Any) -> None:
        updates.append([names[job.entry.param] for job in jobs])
        apply(self, jobs)

    PendingStep.apply = noted  # type: ignore[method-assign]
    try:
        for _ in range(2):
            hold = poseidon.rank() == 1
            x = torch.ones(4, 48, requires_grad=True)
            if hold:  # so that `first` comes last here
                model.module.forward = lambda x: model.module.late(SleepInBackward.apply(model.module.first(x), LATE_S))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if not hold:
                wait_until(lambda: client.done(late), "the gradient of `late`")
        optimizer.synchronize()
    finally:
        PendingStep.apply = apply  # type: ignore[method-assign]
    return updates


def test_a_wait_is_used_to_update_what_is_there() -> None:
    updates = workers.run(2, updates_while_waiting)[0]
    assert updates[:2] == [["late.weight"], ["first.weight"]]
    assert sorted(name for names in updates for name in names) == ["first.weight"] * 2 + ["late.weight"] * 2
