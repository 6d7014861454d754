"""Updates that wait for their gradients: bit for bit the optimizer's own, whichever it is."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR

import poseidon.torch as poseidon
import poseidon.torch.training.trained_model as trained_model
import workers
from overlap_cases import Branches, assert_same_training, own_batch, plain_loop, train_step, wrapped
from poseidon.torch.exchange.mover import StagedTransfer
from test_torch_gradients import MODULES
from test_torch_staged import HostCopies
from torch_cases import EXACT_SCHEMES, all_equal, mean_loss, mlp, mlp_batch, own_rows, parameters_digest

Spec = tuple[type[Optimizer], dict[str, Any]]

SPECS: list[Spec] = [
    (SGD, {"lr": 0.02}),
    (SGD, {"lr": 0.02, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    (SGD, {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (SGD, {"lr": 0.002, "momentum": 0.5, "maximize": True}),
    (SGD, {"lr": 0.02, "momentum": 0.9, "foreach": True}),
    (SGD, {"lr": 0.02, "momentum": 0.9, "fused": True}),
    (Adam, {"lr": 0.01, "betas": (0.4, 0.95), "eps": 1e-3, "weight_decay": 0.02}),
    (Adam, {"lr": 0.01, "amsgrad": True, "foreach": True}),
    (Adam, {"lr": 0.01, "amsgrad": True, "fused": True}),
    (AdamW, {"lr": 0.01, "weight_decay": 0.3}),
    (AdamW, {"lr": torch.tensor(0.01), "maximize": True, "foreach": False}),
    (AdamW, {"lr": 0.01, "fused": True}),
    (RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    (Adagrad, {"lr": 0.01, "lr_decay": 0.1}),
    (Adagrad, {"lr": 0.01, "fused": True}),
    (Adadelta, {"lr": 0.5}),
    (Adamax, {"lr": 0.01}),
    (NAdam, {"lr": 0.01}),
    (RAdam, {"lr": 0.01}),
    (Rprop, {"lr": 0.01}),
    (ASGD, {"lr": 0.01}),
]
USUAL = [SPECS[2], SPECS[7], SPECS[9]]


def maker(spec: Spec) -> Any:
    kind, options = spec
    own = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in options.items()}
    return lambda params: kind(params, **own)


def many(specs: list[Spec], module: type[nn.Module] | None, scheme: str) -> str:
    return " ".join(
        assert_same_training(plain_loop, maker(spec), mlp if module is None else module, scheme=scheme)
        for spec in specs
    )


@pytest.mark.parametrize("scheme", ["ps", "auto"])
def test_same_bits_for_every_optimizer(scheme: str) -> None:
    assert all_equal(workers.run(2, many, SPECS, None, scheme))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("scheme", EXACT_SCHEMES)
def test_same_bits_for_uneven_use(scheme: str, world_size: int) -> None:
    assert all_equal(workers.run(world_size, many, USUAL, Branches, scheme))


@pytest.mark.parametrize("options", [{"small_bytes": 1 << 15}, {"schedule": "sequential"}, {"priority_classes": 1}])
def test_same_bits_with_other_options(options: dict[str, Any]) -> None:
    assert all_equal(workers.run(2, many, USUAL[:2], Branches, "auto", **options))


def groups_with_schedules(kind: str) -> str:
    """The learning rate changes right after every step(), while updates wait."""

    def make(params: Any) -> Optimizer:
        first, *others = list(params)
        groups = [{"params": others[::2], "lr": 0.02}, {"params": [first, *others[1::2]], "weight_decay": 0.1}]
        return SGD(groups, lr=0.01, momentum=0.9) if kind != "tensor" else AdamW(groups, lr=torch.tensor(0.01))

    def loop(model: Any, optimizer: Any) -> list[Any]:
        scheduler: Any = StepLR(optimizer, step_size=1, gamma=0.5)
        if kind == "one cycle":
            scheduler = OneCycleLR(optimizer, max_lr=0.05, total_steps=12)
        elif kind == "inner" and isinstance(optimizer, poseidon.DistributedOptimizer):
            scheduler = LambdaLR(optimizer._inner, lambda epoch: 0.7**epoch)
        elif kind == "inner":
            scheduler = LambdaLR(optimizer, lambda epoch: 0.7**epoch)
        rates = []
        for step in range(6):
            train_step(model, optimizer, step)
            scheduler.step()
            rates.append([float(group["lr"]) for group in optimizer.param_groups])
        return rates

    return assert_same_training(loop, make, Branches)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", ["step", "one cycle", "tensor", "inner"])
def test_groups_and_schedules(kind: str, world_size: int) -> None:
    assert all_equal(workers.run(world_size, groups_with_schedules, kind))


def all_modules(kinds: list[type[nn.Module]]) -> str:
    """Gradients that come in other ways than from one use of a layer."""

    def loop(model: Any, optimizer: Any) -> None:
        for step in range(4):
            inputs, targets = mlp_batch(step, 4 * poseidon.world_size())
            optimizer.zero_grad()
            mean_loss(model, own_rows(inputs), own_rows(targets)).backward()
            optimizer.step()

    return " ".join(assert_same_training(loop, maker(SPECS[9]), kind) for kind in kinds)


@pytest.mark.parametrize("schedule", ["wait_free", "sequential"])
def test_same_bits_for_all_kinds_of_modules(schedule: str) -> None:
    assert all_equal(workers.run(2, all_modules, MODULES, schedule=schedule))


class Zoo(nn.Module):
    """Modules that hand their parameters to PyTorch in ways of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(12, 8)
        self.recurrent = nn.LSTM(8, 8, num_layers=2)
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.convolution = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.prelu = nn.PReLU()
        self.bilinear = nn.Bilinear(8, 8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.embedding((x[:, :6].abs() * 4).long().clamp(max=11))
        rows = self.attention(self.recurrent(rows)[0])
        rows = self.prelu(self.norm(self.convolution(rows.transpose(1, 2)).transpose(1, 2)))
        return self.bilinear(rows.mean(1), rows[:, 0].contiguous())


def zoo() -> str:
    def loop(model: Any, optimizer: Any) -> list[Any]:
        seen = plain_loop(model, optimizer, 3)
        model.eval()
        with torch.no_grad():
            seen.append(model(own_batch(9)[0]).tolist())
        return seen

    return assert_same_training(loop, maker(SPECS[9]), Zoo)


def test_modules_with_ways_of_their_own() -> None:
    assert all_equal(workers.run(2, zoo))


def staged(*args: Any) -> str:
    """The path of device tensors, on host memory."""
    with mock.patch.object(trained_model, "make_transfer", lambda client, device: StagedTransfer(client, HostCopies())):
        return many(*args)


@pytest.mark.parametrize("scheme", ["ps", "auto"])
def test_staged_through_host_memory(scheme: str) -> None:
    assert all_equal(workers.run(2, staged, USUAL[:2], Branches, scheme))


def half_precision() -> str:
    return assert_same_training(plain_loop_bfloat16, maker(SPECS[9]), lambda: mlp(torch.bfloat16))


def plain_loop_bfloat16(model: Any, optimizer: Any) -> None:
    for step in range(4):
        inputs, targets = mlp_batch(step, 4 * poseidon.world_size(), torch.bfloat16)
        optimizer.zero_grad()
        mean_loss(model, own_rows(inputs), own_rows(targets)).backward()
        optimizer.step()


def test_half_precision_parameters() -> None:
    assert all_equal(workers.run(2, half_precision))


def nothing_is_waited_for() -> bool:
    """After step() updates are still to be made; the next forward pass has made them."""
    model, optimizer = wrapped(True, maker(SPECS[2]))
    inputs, targets = own_batch(0)
    for _ in range(2):
        before = parameters_digest(model)
        optimizer.zero_grad()
        mean_loss(model, inputs, targets).backward()
        optimizer.step()
        waiting = [model.synchronizer.flights.in_flight(entry) is not None for entry in model.synced_parameters]
        assert all(waiting)
        optimizer.zero_grad()
        model(inputs)
        waiting = [model.synchronizer.flights.in_flight(entry) is not None for entry in model.synced_parameters]
        assert not any(waiting)
        assert parameters_digest(model) != before
    return True


def test_step_waits_for_nothing() -> None:
    assert workers.run(2, nothing_is_waited_for) == [True, True]
