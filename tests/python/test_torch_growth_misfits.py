"""Jobs that take in workers: long steps, newcomers that do not fit, states of other histories, unusual state."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

pytest.importorskip("poseidon._core", reason="the compiled core is not built")

import poseidon.torch as poseidon
from growth_cases import Event, Fleet
from poseidon.adapter import recovery as recovery_module
from torch_cases import digest
from waiting import compute_for

STEPS = 14


def _slot() -> int:
    return int(os.environ["RANK"])


class Scaled(nn.Linear):
    """Has a number that is neither a parameter nor a buffer."""

    factor = 1.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.factor *= 0.9 if self.training else 1.0
        return super().forward(inputs) * self.factor

    def get_extra_state(self) -> float:
        return self.factor

    def set_extra_state(self, state: float) -> None:
        self.factor = state


class Averaging(torch.optim.SGD):
    """Keeps a mean of the gradients in float32, whatever type the parameters have."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in filter(lambda one: one.grad is not None, group["params"]):
                mean = self.state[param].setdefault("mean", torch.zeros(param.shape))
                mean.mul_(0.9).add_(param.grad.float(), alpha=0.1)
                param.sub_((mean * group["lr"]).to(param.dtype))


def _train(note: Any, change: Callable[[nn.Module, int], None] | None = None, dtype: str = "float32") -> str:
    """Each process begins with a model of its own, as programs do that set no seed."""
    poseidon.init(on_failure="shrink", min_workers=2, replica_check="off")
    torch.manual_seed(_slot())
    width = 5 if os.environ.get("MISFIT") == "width" else 4
    plain = Scaled(8, width).to(getattr(torch, dtype))
    model = poseidon.DistributedDataParallel(plain)
    optimizer = Averaging(plain.parameters(), lr=0.1)
    with mock.patch.object(recovery_module, "_LOOK_SECONDS", 0.05):
        recovery = poseidon.Recovery(model, optimizer, seed=0)
        while recovery.until(STEPS):
            step = recovery.step
            with recovery.attempt():
                rank, size = poseidon.rank(), poseidon.world_size()
                inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))
                optimizer.zero_grad()
                model(inputs.to(plain.weight.dtype)).pow(2).mean().backward()
                optimizer.step()
                compute_for(float(os.environ.get("PAUSE", "0.05")))
            if recovery.step > step:
                note({"step": step, "size": size})
            if change is not None:
                change(plain, recovery.step)
    found = digest(
        [*plain.parameters(), torch.tensor(plain.factor), *(one["mean"] for one in optimizer.state.values())]
    )
    poseidon.shutdown()
    return found


def _sizes(fleet: Fleet) -> list[int]:
    made = {one["step"]: one["size"] for one in fleet.records() if "step" in one}
    return [made[step] for step in range(STEPS)]


def test_newcomers_wait_for_members_whose_steps_are_long(tmp_path: Path) -> None:
    """The window in which a job begins is 0.5 s here."""
    fleet = Fleet(tmp_path / "job", 4, _train, (), {"PAUSE": "1.2", "POSEIDON_TIMEOUT": "30"})
    with contextlib.closing(fleet):
        fleet.begin(2, [Event(2, "start", 2), Event(2, "start", 3)])
        assert fleet.codes() == dict.fromkeys(range(4), 0)
        assert len(set(fleet.digests().values())) == 1
        sizes = _sizes(fleet)
        assert sizes == sorted(sizes), "nobody begins anew"
        assert sizes[-1] == 4


@pytest.mark.parametrize("environment", [{"MISFIT": "width"}, {"POSEIDON_CHUNK_BYTES": "4096"}, {"POSEIDON_RACK": "b"}])
def test_a_newcomer_that_does_not_fit_ends_alone(environment: dict[str, str], tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "job", 3, _train, (), {"POSEIDON_CHUNK_BYTES": "8192"})
    with contextlib.closing(fleet):
        fleet.begin(2, [])
        fleet.wait_for(2)
        with mock.patch.dict(fleet.variables, environment):
            fleet.apply(Event(2, "start", 2))
        codes = fleet.codes()
        assert codes[2] != 0
        assert {slot: code for slot, code in codes.items() if code == 0} == {0: 0, 1: 0}
        assert len(set(fleet.digests().values())) == 1
        assert set(_sizes(fleet)) == {2}


def _freeze(model: nn.Module, step: int) -> None:
    if step == 4:
        model.weight.requires_grad_(False)


def test_members_go_on_where_what_they_do_cannot_be_joined(tmp_path: Path) -> None:
    """A newcomer builds the model as the program begins, and the members have changed it since."""
    fleet = Fleet(tmp_path / "job", 3, _train, (_freeze,), {})
    with contextlib.closing(fleet):
        fleet.begin(2, [Event(6, "start", 2)])
        assert fleet.codes() == {0: 0, 1: 0, 2: 1}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_newcomers_get_extra_state_and_an_optimizers_own_dtypes(dtype: str, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "job", 3, _train, (None, dtype), {})
    with contextlib.closing(fleet):
        fleet.begin(2, [Event(4, "start", 2)])
        assert fleet.codes() == dict.fromkeys(range(3), 0)
        assert len(set(fleet.digests().values())) == 1
        assert _sizes(fleet)[-1] == 3


def _one_is_busy(note: Any) -> str:
    """Two make a step again without the third, which has made it with them, and is busy since."""
    poseidon.init(on_failure="shrink", min_workers=2, replica_check="off")
    torch.manual_seed(0)
    plain = nn.Linear(8, 4)
    model = poseidon.DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    recovery = poseidon.Recovery(model, optimizer, seed=0)
    failures = 0
    while recovery.until(STEPS):
        step = recovery.step
        with contextlib.suppress(OSError), recovery.attempt():
            inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + poseidon.rank()))
            optimizer.zero_grad()
            model(inputs).pow(2).mean().backward()
            optimizer.step()
            if step == 5 and _slot() < 2:
                failures += 1
                busy_s = 0.5 if failures == 1 else 2.5
                time.sleep(busy_s)  # the third makes the step; the second time it is still busy
                if failures == 1:
                    raise OSError("no space left")
        if recovery.step > step:
            note({"step": step, "size": poseidon.world_size()})
        if _slot() == 2 and recovery.step == 6 and not failures:
            failures += 1
            time.sleep(2.5)  # while the others meet without it
    poseidon.shutdown()
    return digest(plain.parameters())


def test_a_state_of_another_history_does_not_count(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "job", 3, _one_is_busy, (), {"POSEIDON_TIMEOUT": "20"})
    with contextlib.closing(fleet):
        fleet.begin(3, [])
        assert fleet.codes() == dict.fromkeys(range(3), 0)
        assert len(set(fleet.digests().values())) == 1
        assert {one["size"] for one in fleet.records() if one.get("step") == 5} == {2, 3}
