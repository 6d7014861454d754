"""Clipping by the norm of all gradients: exact where it is gathered, by the formula where the last step's is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Optimizer

import poseidon.torch as poseidon
import workers
from overlap_cases import Branches, Model, own_batch, wrapped
from torch_cases import all_equal, digest, mean_loss, parameters_digest

MAX_NORM = 0.1


def momentum(params: Any) -> Optimizer:
    return SGD(params, lr=0.5, momentum=0.9)


def adamw(params: Any) -> Optimizer:
    return AdamW(params, lr=0.01, fused=True)


def gathered(make: Any) -> str:
    digests = []
    for overlap in (True, False):
        options: dict[str, Any] = {"max_norm": MAX_NORM} if overlap else {}
        model, optimizer = wrapped(overlap, make, Branches(), **options)
        norms = []
        for step in range(5):
            optimizer.zero_grad()
            mean_loss(model, *own_batch(step)).backward()
            norms.append(digest([] if overlap else [clip_grad_norm_(model.parameters(), MAX_NORM)]))
            optimizer.step()
        digests.append(parameters_digest(model) + digest(p.grad for p in model.parameters() if p.grad is not None))
    assert digests[0] == digests[1]
    return digests[0]


@pytest.mark.parametrize("make", [momentum, adamw])
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_gathered_norm_gives_the_bits_of_clip_grad_norm(world_size: int, make: Any) -> None:
    assert all_equal(workers.run(world_size, gathered, make))


def scaled(make: Any) -> str:
    digests = []
    for scale in (False, True):
        model, optimizer = wrapped(True, make, Branches(), max_norm=MAX_NORM)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scale)
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(mean_loss(model, *own_batch(step))).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
        digests.append(parameters_digest(model))
    assert digests[0] == digests[1]
    return digests[0]


@pytest.mark.parametrize("make", [momentum, adamw])
def test_norms_are_those_of_unscaled_gradients(make: Any) -> None:
    """Also of a fused optimizer, which GradScaler would let divide by the scale itself, after clipping."""
    assert all_equal(workers.run(2, scaled, make))


class ByPreviousNorm:
    """The reference: gradients scaled by the norm that the step before had, in the first step by its own."""

    def __init__(self) -> None:
        self.previous: torch.Tensor | None = None

    def scale(self, model: Model) -> float:
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))
        factor = torch.clamp(MAX_NORM / ((norm if self.previous is None else self.previous) + 1e-6), max=1.0)
        self.previous = norm
        for grad in grads:
            grad.mul_(factor)
        return factor.item()


def by_previous(make: Any) -> tuple[str, bool, int]:
    digests, factors, waiting = [], [], 0
    for overlap in (True, False):
        options: dict[str, Any] = {"max_norm": MAX_NORM, "clip": "previous"} if overlap else {}
        model, optimizer = wrapped(overlap, make, Branches(), **options)
        reference = ByPreviousNorm()
        for step in range(5):
            mean_loss(model, *own_batch(step)).backward()
            if not overlap:
                factors.append(reference.scale(model))
            optimizer.step()
            if overlap and model.synchronizer is not None:
                waiting += any(
                    model.synchronizer.flights.in_flight(entry) is not None for entry in model.synced_parameters
                )
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        digests.append(parameters_digest(model))
    assert digests[0] == digests[1]
    return digests[0], min(factors) < 1, waiting


@pytest.mark.parametrize("make", [momentum, adamw])
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_previous_norm_scales_without_waiting(world_size: int, make: Any) -> None:
    answers = workers.run(world_size, by_previous, make)
    assert all_equal(answers)
    _, clipped, waiting = answers[0]
    assert clipped
    assert waiting == (4 if world_size > 1 else 0)  # only the first step gathers


def no_gradient_at_all() -> str:
    """Steps without gradients neither divide by zero nor count as a norm."""
    model, optimizer = wrapped(True, momentum, max_norm=1e-3, clip="previous")
    before = [param.detach().clone() for param in model.parameters()]
    optimizer.step()
    optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    mean_loss(model, *own_batch(0)).backward()
    optimizer.step()
    moved = torch.stack([(a - b).norm() for a, b in zip(before, model.parameters(), strict=True)]).norm()
    torch.testing.assert_close(moved.item(), 0.5 * 1e-3, rtol=1e-3, atol=0.0)
    return parameters_digest(model)


def test_steps_without_gradients() -> None:
    assert all_equal(workers.run(2, no_gradient_at_all))
    defaults = {"max_norm": None, "clip": "gathered", "resume": False, "aggregator": "sum", "per_parameter": False}
    assert poseidon.DistributedOptimizer.__init__.__kwdefaults__ == defaults
