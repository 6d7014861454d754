"""Torch's powerSGD_hook: the scheme powersgd instead, from the step on that its state says."""

from __future__ import annotations

import logging
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

import poseidon.torch as poseidon
import workers
from poseidon.errors import InvalidArgument, Mismatch
from recovery_cases import Fault, Supervisor
from recovery_cases import train as train_in_attempts
from torch_cases import all_equal, digest, mlp, mlp_batch, own_rows, parameters_digest, run_beside_torch

RANKS = 2
BATCH = 32


def state_of(start: int = 3, rank: int = 2, **fields: Any) -> PowerSGDState:
    return PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=start, **fields)


def backward(model: nn.Module, step: int) -> float:
    inputs, targets = map(own_rows, mlp_batch(step % 4, BATCH))
    model.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    return loss.item()


def gradients(model: nn.Module) -> str:
    return digest(param.grad for param in model.parameters() if param.grad is not None)


# The steps before the compression, and those after.


def beside_schemes(overlapped: bool) -> tuple[list[str], list[bool], list[bool], int, str]:
    """The first layer's scheme by step, whether gradients are those of ps and of powersgd from step 3 on, the count."""
    hooked, exact, lossy = (
        poseidon.DistributedDataParallel(mlp(), scheme=scheme, lossy="") for scheme in ("auto", "ps", "ps")
    )
    state = state_of()
    hooked.register_comm_hook(state, powerSGD_hook)
    if overlapped:
        poseidon.DistributedOptimizer(torch.optim.SGD(hooked.parameters(), lr=0.0), hooked)
    schemes, as_exact, as_lossy = [], [], []
    for step in range(6):
        if step == 3:
            lossy = poseidon.DistributedDataParallel(mlp(), scheme="powersgd")
        for model in (hooked, exact, lossy):
            backward(model, step)
        schemes += [layer.scheme for layer in hooked.synchronization_stats() if layer.name == "0.weight"]
        as_exact.append(gradients(hooked) == gradients(exact))
        as_lossy.append(gradients(hooked) == gradients(lossy))
    return schemes, as_exact, as_lossy, state.iter, gradients(hooked)


@pytest.mark.parametrize("overlapped", [False, True])
def test_the_first_steps_are_exact_and_the_others_those_of_the_scheme(overlapped: bool) -> None:
    answers = workers.run(RANKS, beside_schemes, overlapped, small_bytes=0, powersgd_rank=2)
    for schemes, as_exact, as_lossy, count, _ in answers:
        assert schemes == ["ps"] * 3 + ["powersgd"] * 3
        assert as_exact == [True] * 3 + [False] * 3
        assert as_lossy == [True] * 6
        assert count == 6
    assert all_equal([bits for *_, bits in answers])


def from_a_count(start: int, counted: int) -> list[str]:
    model = poseidon.DistributedDataParallel(mlp())
    before = state_of(start)
    before.iter = counted
    model.register_comm_hook(before, powerSGD_hook)
    rows = []
    for step in range(3):
        backward(model, step)
        rows += [f"{row.scheme}: {row.reason}" for row in model.plan() if row.layer == "0.weight"]
    return rows


def test_a_state_that_has_counted_goes_on() -> None:
    rows = ["ps: exact in the first steps, then powersgd"] + ["powersgd: lossy, chosen by the user"] * 2
    assert workers.run(RANKS, from_a_count, 10, 9, small_bytes=0) == [rows] * RANKS


def rates_and_layers(rate: float) -> tuple[list[str], tuple[float, int, int], list[str]]:
    module = mlp()
    model = poseidon.DistributedDataParallel(module, scheme={"2": "ps", "*": "auto"})
    state = state_of(min_compression_rate=rate, compression_stats_logging_frequency=2)
    model.register_comm_hook(state, powerSGD_hook)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    for step in range(6):
        backward(model, step)
    logger.removeHandler(handler)
    return [row.layer for row in model.plan() if row.scheme == "powersgd"], state.compression_stats(), told


def test_which_layers_are_compressed_and_what_is_counted() -> None:
    # 64×48 becomes 224, 40×64 (asked for exactly) stays, 4×40 would become 88.
    for layers, (_, before, after), told in workers.run(RANKS, rates_and_layers, 2, small_bytes=0):
        assert layers == ["0.weight"]
        numbers = sum(param.numel() for param in mlp().parameters())
        assert (before, after) == (3 * numbers, 3 * (numbers - 64 * 48 + 224))
        assert [text.split(",")[0] for text in told] == ["Compression stats: iter 4", "Compression stats: iter 6"]
    for layers, *_ in workers.run(RANKS, rates_and_layers, 20, small_bytes=0):
        assert layers == []


def embedding(given_by: str) -> tuple[str, list[str]]:
    """The gradients of a dense embedding over several steps, and the schemes of the last one."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(300, 40), nn.Linear(40, 30))
    model = poseidon.DistributedDataParallel(module, scheme="auto" if given_by == "hook" else "powersgd")
    if given_by == "hook":
        state = state_of()
        state.iter = 3
        model.register_comm_hook(state, powerSGD_hook)
    seen = []
    for step in range(3):
        model.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + poseidon.rank())
        model(torch.randint(300, (20,), generator=generator)).square().sum().backward()
        seen += [param.grad.clone() for param in module.parameters() if param.grad is not None]
    return digest(seen), [row.scheme for row in model.plan()]


def test_embeddings_are_compressed_as_by_the_scheme() -> None:
    answers = [
        workers.run(RANKS, embedding, given_by, small_bytes=0, powersgd_rank=2) for given_by in ("hook", "scheme")
    ]
    assert all_equal([bits for answer in answers for bits, _ in answer])
    assert answers[0][0][1] == ["powersgd", "powersgd", "ps"]


# Beside torch's own.


def trained_beside_torch(rank: int, steps: int) -> tuple[list[float], list[float], list[float], str, bool]:
    """Losses with the scheme, with torch's hook in torch's class, and of exact training."""
    ours = poseidon.DistributedDataParallel(mlp())
    theirs, exact = TorchDistributedDataParallel(mlp()), TorchDistributedDataParallel(mlp())
    for model in (ours, theirs):
        model.register_comm_hook(state_of(5, rank), powerSGD_hook)  # type: ignore[operator]
    assert ours.synchronizer is not None
    losses = []
    for model in (ours, theirs, exact):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses.append([])
        for step in range(steps):
            losses[-1].append(backward(model, step))
            optimizer.step()
    return (*losses, parameters_digest(ours), ours.synchronizer.hooked is None)  # type: ignore[return-value]


@pytest.mark.parametrize("rank", [1, 4])
def test_training_goes_as_with_torchs_hook(tmp_path: Path, rank: int) -> None:
    answers = run_beside_torch(RANKS, tmp_path / "store", trained_beside_torch, rank, 120)
    assert all_equal([bits for *_, bits, _ in answers])
    ours, theirs, exact = (
        torch.tensor([answer[which] for answer in answers]).mean(0).view(-1, 20).mean(1) for which in range(3)
    )
    assert all(answer[-1] for answer in answers)
    assert (ours - exact).abs().max() > 0.002  # something is lost
    assert (ours - theirs).abs().max() < 0.002  # the first vectors differ
    assert ours[-1] < 0.6 * ours[0]


# What is not the same.


def refusals() -> tuple[list[str], list[str]]:
    """What is refused, and what runs as torch's hook and is told."""
    refused, told = [], []
    cases: list[tuple[Any, dict[str, Any]]] = [
        (state_of(), {"scheme": "topk"}),
        (state_of(), {"wire": "bf16"}),
    ]
    for state, options in cases:
        with pytest.raises(InvalidArgument) as error:
            poseidon.DistributedDataParallel(mlp(), **options).register_comm_hook(state, powerSGD_hook)
        refused.append(str(error.value))
    with_residual = state_of()
    with_residual.error_dict[0] = torch.zeros(1)
    for state in (
        state_of(use_error_feedback=False),
        state_of(warm_start=False),
        state_of(orthogonalization_epsilon=1e-8),
        state_of(min_compression_rate=0.5),
        with_residual,
        None,  # torch's hook fails at the first backward pass
    ):
        model = poseidon.DistributedDataParallel(mlp())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.register_comm_hook(state, powerSGD_hook)
        assert model.synchronizer is not None
        assert model.synchronizer.hooked is not None
        told.append(str(caught[-1].message))
    return refused, told


def test_what_the_scheme_does_not_do_is_said(tmp_path: Path) -> None:
    for refused, told in run_beside_torch(RANKS, tmp_path / "store", refusals):
        for text, expected in zip(refused, ("compress nothing", "sends numbers as they are"), strict=True):
            assert expected in text
        fields = (
            "use_error_feedback",
            "warm_start",
            "epsilon=1e-08",
            "min_compression_rate=0.5",
            "residuals of torch",
            "None",
        )
        for text, expected in zip(told, fields, strict=True):
            assert expected in text


def of_other_ranks() -> str:
    model = poseidon.DistributedDataParallel(mlp())
    with pytest.raises(Mismatch) as error:
        model.register_comm_hook(state_of(rank=1 + poseidon.rank()), powerSGD_hook)
    return str(error.value)


def test_ranks_that_disagree_are_told() -> None:
    assert all("rank 1, step 0" in text for text in workers.run_fresh(RANKS, in_own_job, of_other_ranks))


def in_own_job(function: Any) -> Any:
    poseidon.init(small_bytes=0)
    return function()


# Checkpoints and recovery.


def checkpointed() -> tuple[str, str]:
    """Parameters after three more steps: without a break, and of a new model with a loaded state."""

    def go_on(model: nn.Module, steps: range) -> str:
        for step in steps:
            backward(model, step)
        return gradients(model)

    model, state = poseidon.DistributedDataParallel(mlp()), state_of()
    model.register_comm_hook(state, powerSGD_hook)
    go_on(model, range(5))
    saved, counted = model.state_dict(), {slot: getattr(state, slot) for slot in ("iter", "start_powerSGD_iter")}
    expected = go_on(model, range(5, 8))
    again, loaded = poseidon.DistributedDataParallel(mlp()), state_of()
    for slot, value in pickle.loads(pickle.dumps(counted)).items():
        setattr(loaded, slot, value)
    again.register_comm_hook(loaded, powerSGD_hook)
    again.load_state_dict(saved)
    return expected, go_on(again, range(5, 8))


def test_a_checkpoint_has_what_was_not_sent() -> None:
    for expected, got in workers.run(RANKS, checkpointed, small_bytes=0):
        assert got == expected


@pytest.mark.parametrize("kind", ["sgd dropout hook", "adamw overlap dropout hook"])
def test_after_failures_the_bits_are_those_without(tmp_path: Path, kind: str) -> None:
    """The compression begins with step 3: before, at and after it."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    whole = Supervisor(tmp_path / "whole", 3).run(train_in_attempts, kind, 7, [])
    faults = [
        Fault(1, step, phase) for step, phase in ((1, "backward"), (3, "backward"), (3, "after step"), (5, "between"))
    ]
    watching = Supervisor(tmp_path / "cut", 3)
    cut = watching.run(train_in_attempts, kind, 7, faults, str(tmp_path / "snapshots"))
    assert watching.restarted == len(faults)
    assert {answer["digest"] for answer in cut} == {answer["digest"] for answer in whole}
