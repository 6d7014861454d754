"""Error feedback of wire formats: what rounding takes from a gradient is in the next one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import poseidon
import poseidon.torch
import workers
from poseidon.errors import InvalidArgument
from poseidon.torch import DistributedDataParallel, DistributedOptimizer, LocalSGD
from recovery_cases import Fault, Supervisor, train
from torch_cases import all_equal, digest, mlp, mlp_batch, own_rows, parameters_digest

RANKS = 3
FORMATS = ["bf16", "fp16", "int8"]


def summed(wire: str, overlapped: bool) -> tuple[float, str]:
    """How far the sum of many equal gradients is from the exact one, and a digest of the residuals' model."""
    torch.manual_seed(0)
    module = nn.Conv2d(8, 40, 5)
    model = DistributedDataParallel(module, wire=wire)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if overlapped:
        optimizer = DistributedOptimizer(optimizer, model)
    slope = torch.randn(module.weight.shape, generator=torch.Generator().manual_seed(1))
    begin = module.weight.detach().clone()
    steps = 64
    for _ in range(steps):
        optimizer.zero_grad()
        (1e-3 * (module.weight * slope).sum() + 0 * model(torch.zeros(1, 8, 5, 5)).sum()).backward()
        optimizer.step()
    moved = (begin - module.weight.detach()) / steps
    return float((moved / 1e-3 - slope).abs().max()), parameters_digest(module)


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("wire", FORMATS)
def test_what_is_rounded_off_arrives_later(wire: str, overlapped: bool) -> None:
    with_feedback = workers.run(RANKS, summed, wire, overlapped, small_bytes=0, error_feedback="on")
    without = workers.run(RANKS, summed, wire, overlapped, small_bytes=0)
    for answers in (with_feedback, without):
        assert all_equal([bits for _, bits in answers])
    # Without, every step has the same error. With it, the server's rounding is left.
    assert with_feedback[0][0] < 0.75 * without[0][0], (with_feedback[0][0], without[0][0])


def rows_and_dense() -> list[tuple[str, bool]]:
    """An embedding's scheme by step, and whether it has kept something else than after the step before."""
    module = nn.Embedding(200, 40)
    model = DistributedDataParallel(module, wire="bf16")
    assert model.synchronizer is not None
    seen, before = [], b""
    for used in (200, 200, 2, 2, 2):
        model.zero_grad()
        weights = torch.randn(used, 40, generator=torch.Generator().manual_seed(used))
        (model(torch.arange(used)) * weights).sum().backward()
        (layer,) = model.synchronization_stats()
        (residual,) = model.synchronizer.layers.residuals().values()
        seen.append((layer.scheme, residual.tobytes() != before))
        before = residual.tobytes()
    return seen


def test_an_embedding_keeps_what_its_dense_gradients_lose() -> None:
    for seen in workers.run(2, rows_and_dense, small_bytes=0, error_feedback="on"):
        assert {scheme for scheme, _ in seen} == {"ps", "rows"}, seen
        assert all(changed == (scheme == "ps") for scheme, changed in seen), seen


def with_hook() -> list[int]:
    """How many layers keep something: before torch's hook sets the wire format, and after a step with it."""
    model = DistributedDataParallel(mlp(), scheme="ps")
    assert model.synchronizer is not None
    kept = []
    for step in range(2):
        if step:
            model.register_comm_hook(None, default_hooks.bf16_compress_hook)
        model.zero_grad()
        nn.functional.mse_loss(model(mlp_batch(step, 8)[0]), mlp_batch(step, 8)[1]).backward()
        kept.append(sum(bool(residual.any()) for residual in model.synchronizer.layers.residuals().values()))
    return kept


def test_torchs_hooks_get_it_too() -> None:
    assert workers.run(2, with_hook, small_bytes=0, error_feedback="on") == [[0, 6]] * 2


def in_the_end(wire: str, what: str) -> tuple[str, str, list[str]]:
    """Gradients after a checkpoint, without a break and of a new model that has loaded it, and what a state has."""

    def steps(model: nn.Module, numbers: range) -> str:
        grads = []
        for step in numbers:
            inputs, targets = map(own_rows, mlp_batch(step, 8 * RANKS))
            model.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            grads += [param.grad.clone() for param in model.parameters() if param.grad is not None]
        return digest(grads)

    model = DistributedDataParallel(mlp(), wire=wire, scheme="ps")
    steps(model, range(3))
    saved = model.state_dict()
    expected = steps(model, range(3, 6))
    again = DistributedDataParallel(mlp(), wire=wire, scheme="ps")
    if what == "all":
        again.load_state_dict(saved)
    return expected, steps(again, range(3, 6)), [key for key in saved if not key.startswith("module.")]


@pytest.mark.parametrize("wire", FORMATS)
def test_a_checkpoint_has_the_residuals(wire: str) -> None:
    for expected, got, keys in workers.run(RANKS, in_the_end, wire, "all", small_bytes=0, error_feedback="on"):
        assert got == expected
        assert keys == ["_extra_state"]
    for expected, got, _ in workers.run(RANKS, in_the_end, wire, "nothing", small_bytes=0, error_feedback="on"):
        assert got != expected
    for _, _, keys in workers.run(RANKS, in_the_end, wire, "all", small_bytes=0):
        assert keys == []


@pytest.mark.parametrize("kind", ["sgd dropout", "adamw overlap dropout"])
@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_after_failures_the_bits_are_those_without(tmp_path: Path, kind: str, wire: str) -> None:
    options = {"POSEIDON_WIRE": wire, "POSEIDON_ERROR_FEEDBACK": "on", "POSEIDON_SCHEME": "ps"}
    for folder in ("whole", "cut", "plain"):
        (tmp_path / folder).mkdir()
    whole = Supervisor(tmp_path / "whole", RANKS, **options).run(train, kind, 7, [])
    faults = [Fault(1, 1, "backward"), Fault(1, 4, "after step"), Fault(1, 5, "between")]
    watching = Supervisor(tmp_path / "cut", RANKS, **options)
    cut = watching.run(train, kind, 7, faults, str(tmp_path / "snapshots"))
    assert watching.restarted == len(faults)
    assert {answer["digest"] for answer in cut} == {answer["digest"] for answer in whole}
    plain = Supervisor(tmp_path / "plain", RANKS, **{**options, "POSEIDON_ERROR_FEEDBACK": "off"}).run(
        train, kind, 7, []
    )
    assert {answer["digest"] for answer in plain} != {answer["digest"] for answer in whole}


def updated_by_servers(feedback_expected: bool) -> tuple[float, str]:
    torch.manual_seed(0)
    module = nn.Linear(60, 50)
    model = DistributedDataParallel(module, wire="int8")
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, update="server")
    begin = module.weight.detach().clone()
    for _ in range(64):
        optimizer.zero_grad()
        inputs = torch.linspace(0.001, 1, 60).repeat(2, 1)
        (1e-3 * model(inputs).sum()).backward()
        optimizer.step()
    moved = (begin - module.weight.detach()) / 64
    wanted = 2e-3 * torch.linspace(0.001, 1, 60).expand(50, 60)
    assert model.synchronizer is not None
    assert bool(model.synchronizer.layers.residuals()) == feedback_expected
    return float((moved - wanted).abs().max()), parameters_digest(module)


def test_servers_that_update_get_it_too() -> None:
    kept = workers.run(RANKS, updated_by_servers, True, small_bytes=0, error_feedback="on")
    lost = workers.run(RANKS, updated_by_servers, False, small_bytes=0)
    assert all_equal([bits for _, bits in kept])
    assert kept[0][0] < 0.1 * lost[0][0]


def refusals() -> list[str]:
    poseidon.torch.init()
    texts = []
    with pytest.raises(InvalidArgument) as error:
        LocalSGD(mlp(), torch.optim.SGD(mlp().parameters(), lr=0.1), 2)
    texts.append(str(error.value))
    return texts


def drifting(options: dict[str, Any]) -> str:
    poseidon.torch.init(**options)
    with pytest.raises(InvalidArgument) as error:
        DistributedDataParallel(mlp(), wire="bf16")
    return str(error.value)


def drifting_hook(options: dict[str, Any]) -> str:
    poseidon.torch.init(**options)
    model = DistributedDataParallel(mlp())
    with pytest.raises(InvalidArgument) as error:
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    return str(error.value)


def test_what_keeps_nothing_refuses_it() -> None:
    for (text,) in workers.run_fresh(2, refusals, POSEIDON_ERROR_FEEDBACK="on"):
        assert "error_feedback=on and LocalSGD exclude each other" in text
    for text in workers.run_fresh(2, drifting_hook, {"stragglers": "drop", "error_feedback": "on"}):
        assert "error_feedback, which stragglers=drop excludes" in text
    for text in workers.run_fresh(2, drifting, {"stragglers": "drop", "error_feedback": "on"}):
        assert "error_feedback, which stragglers=drop excludes" in text
    with pytest.raises(InvalidArgument, match="leave error_feedback out"):
        poseidon.connect(error_feedback="on")
