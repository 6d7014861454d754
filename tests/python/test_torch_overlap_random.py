"""Updates that wait for their gradients: random loops over random models, always the bits of plain training."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import ExponentialLR

import poseidon.torch as poseidon
import workers
from overlap_cases import assert_same_training
from torch_cases import all_equal, mlp_batch, own_rows
from waiting import compute_for

ACTIONS = (
    *("backward", "backward", "backward", "step", "step", "step", "local", "dawdle", "schedule", "state"),
    *("zero", "zero_in_place", "model_zero", "late_zero", "evaluate", "look", "gradients", "average", "clip"),
    *("edit", "drop"),
)


@dataclass(frozen=True)
class Case:
    """One random training."""

    widths: tuple[int, ...]
    skips: tuple[int, ...]  # layers that are used in every second forward pass only
    shared: bool
    optimizer: int
    scheme: str
    actions: tuple[str, ...]
    delays: tuple[int, ...]  # ms, of a rank in turn


class Random(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = (48, *case.widths)
        self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in itertools.pairwise(sizes)][::-1])
        self.norms = nn.ModuleList([nn.LayerNorm(width) for width in case.widths])
        self.last = nn.Linear(sizes[-1], 4)
        self.skips = case.skips
        self.shared = case.shared

    def forward(self, x: torch.Tensor, count: int) -> torch.Tensor:
        for index, layer in enumerate(list(self.layers)[::-1]):
            x = torch.tanh(layer(x))
            if index not in self.skips or count % 2:
                x = self.norms[index](x)
        if self.shared:
            x = x + 0.1 * self.last.weight.sum()
        return self.last(x)


def optimizer_of(case: Case, params: Any) -> Optimizer:
    kinds: list[Any] = [
        lambda: SGD(params, lr=0.05, momentum=0.9, nesterov=True),
        lambda: SGD(params, lr=0.05),
        lambda: Adam(params, lr=0.01, amsgrad=True),
        lambda: AdamW(params, lr=0.01, fused=True),
        lambda: RMSprop(params, lr=0.01, foreach=True),
    ]
    return kinds[case.optimizer]()


class Training:
    """Does the actions of a case one by one; `seen` is what came out on the way."""

    def __init__(self, case: Case, model: Any, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer
        self.kept = list(model.module.parameters())
        self.average = [param.detach().clone() for param in self.kept]
        self.scheduler = ExponentialLR(optimizer, 0.8)
        self.delays = case.delays
        self.count = 0
        self.seen: list[Any] = []

    def loss(self, model: Any) -> torch.Tensor:
        self.count += 1
        inputs, targets = mlp_batch(self.count, 2 * poseidon.world_size())
        result = model(own_rows(inputs), self.count)
        return nn.functional.mse_loss(result, own_rows(targets))

    def backward(self) -> None:
        loss = self.loss(self.model)
        loss.backward()
        self.seen.append(loss.item())

    def step(self) -> None:
        self.optimizer.step()

    def local(self) -> None:
        """Without exchange; the other ranks' part comes with the exchange that follows."""
        with self.model.no_sync():
            self.loss(self.model).backward()
        self.backward()

    def zero(self) -> None:
        self.optimizer.zero_grad()

    def zero_in_place(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)

    def model_zero(self) -> None:
        (self.model if self.count % 2 else self.model.module).zero_grad(set_to_none=self.count % 3 > 0)

    def late_zero(self) -> None:
        loss = self.loss(self.model)
        self.optimizer.zero_grad()
        loss.backward()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.seen.append(self.loss(self.model if self.count % 2 else self.model.module).item())

    def look(self) -> None:
        self.seen.append(self.kept[self.count % len(self.kept)].sum().item())

    def gradients(self) -> None:
        self.seen.append([None if param.grad is None else param.grad.sum().item() for param in self.kept[::2]])

    def clip(self) -> None:
        self.seen.append(clip_grad_norm_(self.kept, 0.5).item())

    def edit(self) -> None:
        with torch.no_grad():
            self.kept[self.count % len(self.kept)].mul_(0.9)

    def dawdle(self) -> None:
        if poseidon.rank() == self.count % poseidon.world_size():
            compute_for(self.delays[self.count % len(self.delays)] / 1000)

    def schedule(self) -> None:
        if self.scheduler.last_epoch < 4:
            self.scheduler.step()

    def state(self) -> None:
        self.optimizer.load_state_dict(self.optimizer.state_dict())
        self.model.load_state_dict(self.model.state_dict())

    def average_(self) -> None:
        with torch.no_grad():
            torch._foreach_lerp_(self.average, self.kept, 0.5)
        self.seen.append(self.average[0].sum().item())

    def drop(self) -> None:
        self.kept[self.count % len(self.kept)].grad = None


def train(case: Case) -> str:
    def loop(model: Any, optimizer: Any) -> list[Any]:
        training = Training(case, model, optimizer)
        for action in case.actions:
            getattr(training, "average_" if action == "average" else action)()
        return training.seen

    return assert_same_training(
        loop, lambda params: optimizer_of(case, params), lambda: Random(case), scheme=case.scheme
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, Case, dict[str, Any]]:
    widths = tuple(draw(st.lists(st.integers(1, 60), min_size=1, max_size=5)))
    case = Case(
        widths=widths,
        skips=tuple(draw(st.lists(st.integers(0, len(widths) - 1), max_size=2))),
        shared=draw(st.booleans()),
        optimizer=draw(st.integers(0, 4)),
        scheme=draw(st.sampled_from(["auto", "ps", "sfb"])),
        actions=("backward", *draw(st.lists(st.sampled_from(ACTIONS), min_size=3, max_size=20))),
        delays=tuple(draw(st.lists(st.integers(0, 20), min_size=1, max_size=3))),
    )
    options = {
        "chunk_bytes": draw(st.sampled_from([64, 1000, 1 << 21])),
        "small_bytes": draw(st.sampled_from([0, 500, 1 << 15])),
        "priority_order": draw(st.sampled_from(["urgency", "fifo", "reverse", "random"])),
        "priority_classes": draw(st.integers(1, 3)),
    }
    return draw(st.integers(1, 3)), case, options


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_any_loop_has_the_bits_of_plain_training(drawn: tuple[int, Case, dict[str, Any]]) -> None:
    world_size, case, options = drawn
    assert all_equal(workers.run(world_size, train, case, **options))
