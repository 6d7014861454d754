"""The order of copies, products and exchanges of device tensors, on streams whose clocks are checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import AdamW, Optimizer

import workers
from overlap_cases import train_step, wrapped
from poseidon.torch.exchange.mover import DeviceCopies
from stream_races import races
from test_torch_gradients import OneLinear, Reused, gradients_of
from test_torch_training import train
from torch_cases import all_equal, digest, mlp


def in_order(function: Callable[..., Any], *args: Any) -> Any:
    found, side_access_count, result = races(DeviceCopies, function, *args)
    assert not found, "\n".join(found[:10])
    assert side_access_count > 0
    return result


@pytest.mark.parametrize("scheme", ["auto", "ps", "sfb"])
def test_training_has_no_races(scheme: str) -> None:
    assert all_equal(workers.run(2, in_order, train, scheme, torch.float32, "sgd", 3, True, 6))


@pytest.mark.parametrize("kind", [OneLinear, Reused])
def test_gradients_have_no_races(kind: type[torch.nn.Module]) -> None:
    assert all_equal(workers.run(2, in_order, gradients_of, kind, "auto"))


def on_servers() -> str:
    """Trains with updates on servers."""
    model, optimizer = wrapped(True, adamw, mlp(), scheme="ps", update="server")
    for step in range(4):
        train_step(model, optimizer, step)
    optimizer.synchronize()
    return digest(model.parameters())


def adamw(params: Any) -> Optimizer:
    return AdamW(params, lr=1e-4)


def test_updates_on_servers_have_no_races() -> None:
    assert all_equal(workers.run(2, in_order, on_servers))


class CopiesTooEarly(DeviceCopies):
    def to_host(self, source: torch.Tensor, host: torch.Tensor) -> Callable[[], None]:
        copied = self._runtime.Event()
        with self._runtime.stream(self._stream):
            host.copy_(source.reshape(-1), non_blocking=True)
            copied.record(self._stream)
        return copied.synchronize


class StartsTooEarly(DeviceCopies):
    def to_host(self, source: torch.Tensor, host: torch.Tensor) -> Callable[[], None]:
        super().to_host(source, host)
        return lambda: None


class GoesOnTooEarly(DeviceCopies):
    def join(self) -> None:
        pass


def races_with(copies: type[DeviceCopies], *args: Any) -> list[str]:
    return races(copies, train, *args)[0]


@pytest.mark.parametrize(
    ("copies", "told"),
    [
        (CopiesTooEarly, "copy_.default on the side stream is not ordered after"),
        (StartsTooEarly, "on the core is not ordered after aten.copy_.default on the side stream"),
        (GoesOnTooEarly, "on the main stream is not ordered after aten.copy_.default on the side stream"),
    ],
)
def test_a_missing_wait_is_found(copies: type[DeviceCopies], told: str) -> None:
    for found in workers.run(2, races_with, copies, "ps", torch.float32, "sgd", 2, True, 6):
        assert any(told in race for race in found), found[:5]
