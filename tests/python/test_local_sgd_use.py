"""LocalSGD in a program: schedulers, GradScaler, checkpoints, uneven data, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import poseidon.torch as poseidon
import workers
from local_sgd_cases import (
    OUTER,
    RANKS,
    STEPS,
    Emulation,
    adamw,
    backward,
    batch,
    momentum_sgd,
    replicas_equal,
)
from poseidon.errors import InvalidArgument, Mismatch, PoseidonError
from torch_cases import mlp, parameters_digest

# What stands around an optimizer.


def scheduled() -> tuple[list[float], int, list[str]]:
    model = mlp()
    calls: list[str] = []
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    inner.register_step_pre_hook(lambda *_: calls.append("inner"))
    optimizer = poseidon.LocalSGD(model, inner, 2)
    optimizer.register_step_post_hook(lambda *_: calls.append("outer"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    rates = []
    for step in range(3):

        def closure(step: int = step) -> float:
            optimizer.zero_grad()
            backward(model, poseidon.rank(), step)
            return 7.0

        assert optimizer.step(closure) == 7.0
        scheduler.step()
        rates.append(inner.param_groups[0]["lr"])
    return rates, optimizer.averaging_count, calls


def test_schedulers_hooks_and_closures() -> None:
    assert workers.run(2, scheduled) == [([0.5, 0.25, 0.125], 1, ["inner", "outer"] * 3)] * 2


def scaled(unscales: bool) -> tuple[list[str], int, float]:
    model = mlp()
    optimizer = poseidon.LocalSGD(model, momentum_sgd(model), 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    digests = []
    for step in range(4):
        optimizer.zero_grad()
        inputs, targets = batch(poseidon.rank(), step)
        scaler.scale(nn.functional.mse_loss(model(inputs), targets)).backward()
        if step == 1 and poseidon.rank() == 1:
            next(model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        digests.append(parameters_digest(model))
    return digests, optimizer.step_count, scaler.get_scale()


@pytest.mark.parametrize("unscales", [False, True])
def test_a_step_that_a_scaler_skips_on_one_rank_counts(unscales: bool) -> None:
    emulation = Emulation(momentum_sgd, mlp())
    answers = workers.run(RANKS, scaled, unscales)
    for step in range(4):
        before = copy.deepcopy(emulation.models[1]).state_dict()
        state = copy.deepcopy(emulation.optimizers[1].state_dict())
        emulation.step(step)
        if step == 1:
            emulation.models[1].load_state_dict(before)
            emulation.optimizers[1].load_state_dict(state)
        if step % 2:
            emulation.average()
        digests = [parameters_digest(model) for model in emulation.models]
        assert digests == [answer[0][step] for answer in answers]
    assert [answer[1] for answer in answers] == [4] * RANKS
    assert [answer[2] for answer in answers] == [1024.0, 512.0, 1024.0]


# Checkpoints.


def interrupted(options: dict[str, Any], at: int, whole: bool) -> bool:
    """Whether a training that goes on from a checkpoint at this step has the bits of one that was not interrupted."""
    model = mlp()
    optimizer = poseidon.LocalSGD(model, adamw(model), 3, **options)
    saved: Any = None
    for step in range(STEPS):
        if step == at:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        optimizer.zero_grad()
        backward(model, poseidon.rank(), step)
        optimizer.step()
    other = mlp()
    with torch.no_grad():
        for param in other.parameters():
            param.add_(1)
    again = poseidon.LocalSGD(other, adamw(other), 3, **options)
    if whole:
        again.load_state_dict(saved[1])
    other.load_state_dict(saved[0])
    if not whole:
        again.load_state_dict(saved[1])
    for step in range(at, STEPS):
        again.zero_grad()
        backward(other, poseidon.rank(), step)
        again.step()
    assert again.step_count == STEPS
    return parameters_digest(other) == parameters_digest(model)


@pytest.mark.parametrize("size", [1, RANKS])
@pytest.mark.parametrize("options", [{}, {"outer": OUTER}, {"wire": "int8"}])
@pytest.mark.parametrize("at", [3, 4])
def test_checkpoints(size: int, options: dict[str, Any], at: int) -> None:
    assert all(workers.run(size, interrupted, options, at, at == 3))


def loaded_without_a_word() -> None:
    model = mlp()
    optimizer = poseidon.LocalSGD(model, adamw(model), 2, outer=OUTER)
    model.load_state_dict(mlp().state_dict())
    backward(model, poseidon.rank(), 0)
    with pytest.raises(PoseidonError, match="the model was loaded"):
        optimizer.step()
    with torch.no_grad():
        next(model.parameters()).add_(poseidon.rank() + 1)
    optimizer.push_parameters()
    assert replicas_equal(model)
    optimizer.step()
    optimizer.step()
    assert replicas_equal(model)


def test_a_model_that_is_loaded_alone() -> None:
    workers.run(2, loaded_without_a_word)


def states_of_others() -> None:
    model = mlp()
    plain = poseidon.LocalSGD(model, adamw(model), 2)
    outer = poseidon.LocalSGD(model, adamw(model), 2, outer=OUTER)
    with pytest.raises(Mismatch, match="LocalSGD has none"):
        plain.load_state_dict(outer.state_dict())
    with pytest.raises(Mismatch, match="push_parameters"):
        outer.load_state_dict(plain.state_dict())
    other = mlp()[:1]
    with pytest.raises(ValueError, match="param"):
        poseidon.LocalSGD(other, adamw(other), 2, outer=OUTER).load_state_dict(outer.state_dict())
    inner = adamw(model)
    inner.load_state_dict(plain.state_dict())
    plain.load_state_dict(inner.state_dict())


def test_states_of_others_are_refused() -> None:
    workers.run(2, states_of_others)


def another_every(fragments: int) -> None:
    def made(every: int) -> poseidon.LocalSGD:
        model = mlp()
        return poseidon.LocalSGD(model, adamw(model), every, fragments=fragments)

    saved = made(8)
    for step in range(5):
        backward(saved.model, poseidon.rank(), step)
        saved.step()
    state = copy.deepcopy(saved.state_dict())
    for every in (4, 16):
        with pytest.raises(Mismatch, match=rf"every=8, 5 steps.*every={every}: pass the same every.*average\(\)"):
            made(every).load_state_dict(state)
    made(8).load_state_dict(state)
    del state["local_sgd"]["every"]  # as it was saved before this was a part of it
    with pytest.raises(Mismatch, match="a larger every, 5 steps"):
        made(4).load_state_dict(state)
    made(8).load_state_dict(state)
    saved.average()
    other = made(4)
    other.model.load_state_dict(saved.model.state_dict())
    other.load_state_dict(saved.state_dict())
    for step in range(4):
        backward(other.model, poseidon.rank(), step)
        other.step()
    assert other.averaging_count == 2
    assert replicas_equal(other.model) == (fragments == 1)


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_period_goes_on_with_its_own_length_only(fragments: int) -> None:
    workers.run(2, another_every, fragments)


# Uneven data and other differences between the ranks.


def uneven(steps: int) -> str:
    model = mlp()
    optimizer = poseidon.LocalSGD(model, adamw(model), 4)
    for step in range(steps - poseidon.rank()):
        optimizer.zero_grad()
        backward(model, poseidon.rank(), step)
        optimizer.step()
    optimizer.average()
    optimizer.average()
    assert optimizer.averaging_count == 1 + (steps > 4)
    return parameters_digest(model)


def test_an_uneven_epoch_ends_with_average() -> None:
    emulation = Emulation(adamw, mlp(), ranks=2)
    for rank, (model, optimizer) in enumerate(zip(emulation.models, emulation.optimizers, strict=True)):
        for step in range(3 - rank):
            optimizer.zero_grad()
            backward(model, rank, step)
            optimizer.step()
    emulation.average()
    assert set(workers.run(2, uneven, 3)) == {parameters_digest(emulation.models[0])}
    assert len(set(workers.run(2, uneven, 6))) == 1


def at_different_places() -> None:
    model = mlp()
    optimizer = poseidon.LocalSGD(model, adamw(model), 2)
    backward(model, 0, 0)
    optimizer.step()
    with pytest.raises(Mismatch, match="every rank"):
        optimizer.step() if poseidon.rank() else optimizer.average()


def test_ranks_at_different_places() -> None:
    workers.run(2, at_different_places)


def different_arguments() -> None:
    model, own = mlp(), poseidon.rank()
    with pytest.raises(Mismatch, match=r"every 2.*every 3"):
        poseidon.LocalSGD(model, adamw(model), 2 + own)
    with pytest.raises(Mismatch, match="outer"):
        poseidon.LocalSGD(model, adamw(model), 2, outer=poseidon.OuterNesterov(0.5 + own / 10))
    with pytest.raises(Mismatch, match="lr"):
        poseidon.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.5 + own), 2)


def test_different_arguments() -> None:
    workers.run(2, different_arguments)


# Misuse.


def refused(match: str, *arguments: Any, **options: Any) -> None:
    with pytest.raises(InvalidArgument, match=match):
        poseidon.LocalSGD(*arguments, **options)


def misuse() -> None:
    model = mlp()
    inner = adamw(model)
    refused("1 or more", model, inner, 0)
    refused("1 or more", model, inner, 2.5)
    refused("pass the model first", inner, model, 2)
    refused(r"\.module", poseidon.DistributedDataParallel(model), inner, 2)
    refused("OuterNesterov", model, inner, 2, outer=torch.optim.SGD(model.parameters()))
    refused("not the model's", mlp(), inner, 2)
    refused("at least one parameter", nn.BatchNorm1d(3, affine=False), inner, 2)
    local = poseidon.LocalSGD(model, inner, 2)
    refused("LocalSGD already", model, local, 2)
    half = mlp(torch.float16)
    refused("float16", half, adamw(half), 2, outer=OUTER)
    double = mlp(torch.float64)
    refused("float64", double, adamw(double), 2, wire="int8")
    storage = torch.zeros(4)
    shared = nn.ParameterList([nn.Parameter(storage[:3]), nn.Parameter(storage[1:])])
    refused("share memory", shared, adamw(shared), 2)
    with pytest.raises(InvalidArgument, match="state_dict"):
        copy.deepcopy(local)
    with pytest.raises(InvalidArgument, match="above 0"):
        poseidon.OuterNesterov(lr=0.0)
    with pytest.raises(InvalidArgument, match="less than 1"):
        poseidon.OuterNesterov(momentum=1.0)


def test_misuse() -> None:
    workers.run(2, misuse)


def changed_models() -> None:
    model = mlp()
    model[4].requires_grad_(False)
    optimizer = poseidon.LocalSGD(model, adamw(model), 1)
    model[4].requires_grad_(True)
    with pytest.raises(InvalidArgument, match=r"4\.weight is new or trains now"):
        optimizer.step()
    model = mlp()
    optimizer = poseidon.LocalSGD(model, adamw(model), 1)
    model[4].weight = nn.Parameter(torch.zeros_like(model[4].weight), requires_grad=False)
    with pytest.raises(InvalidArgument, match=r"4\.weight was replaced"):
        optimizer.step()


def test_models_that_change() -> None:
    workers.run(2, changed_models)


def by_turns(first: bool, second: bool) -> bool:
    """Trains the body and the head of a model by a LocalSGD each, with an outer update or without, one after the other.

    Returns whether they are refused. One that takes over for good is not.
    """
    module = mlp()
    params = list(module.parameters())
    options = [{"outer": poseidon.OuterNesterov()} if outer else {} for outer in (first, second)]
    parts = [
        poseidon.LocalSGD(module, torch.optim.SGD(part, lr=0.1), 4, **given)
        for part, given in zip((params[:4], params[4:]), options, strict=True)
    ]

    def step(part: poseidon.LocalSGD) -> None:
        module(torch.ones(2, params[0].shape[1])).sum().backward()
        part.step()

    for which in (0, 0, 1, 1):
        step(parts[which])
    if not first and not second:
        step(parts[0])
        return False
    with pytest.raises(InvalidArgument, match="a second LocalSGD that trains the same model by turns"):
        step(parts[0])
    return True


@pytest.mark.parametrize(("first", "second"), [(False, False), (True, False), (False, True), (True, True)])
def test_two_for_one_model_update_no_averages_twice(first: bool, second: bool) -> None:
    assert workers.run(2, by_turns, first, second) == [first or second] * 2


def drifting() -> None:
    model = mlp()
    refused("stragglers=drop", model, adamw(model), 2)


def test_jobs_whose_ranks_drift() -> None:
    workers.run(2, drifting, stragglers="drop")


def recovering() -> bool:
    poseidon.init(on_failure="rejoin")
    model = mlp()
    optimizer = poseidon.LocalSGD(model, adamw(model), 2)
    with pytest.raises(InvalidArgument, match="give the LocalSGD to Recovery"):
        optimizer.step()
    with pytest.raises(InvalidArgument, match="pass a directory"):
        poseidon.Recovery(optimizer)
    with pytest.raises(InvalidArgument, match="comes first"):
        poseidon.Recovery(optimizer, poseidon.LocalSGD(model, adamw(model), 2))
    with pytest.raises(InvalidArgument, match="keep 2 or more"):
        poseidon.Recovery(optimizer, directory="unused", keep=1)
    return True


def shrinking() -> bool:
    poseidon.init(on_failure="shrink")
    model = mlp()
    refused("on_failure=shrink", model, adamw(model), 2)
    return True


def test_jobs_that_recover() -> None:
    assert workers.run_fresh(2, recovering) == [True, True]
    assert workers.run_fresh(2, shrinking) == [True, True]


def planned() -> tuple[bool, bool, float]:
    model = poseidon.DistributedDataParallel(mlp())
    fast, slow = model.plan(1e9), model.plan(1e4)
    assert slow.exchange_seconds is not None
    return "LocalSGD" in str(fast), "poseidon.LocalSGD" in str(slow).splitlines()[-1], slow.exchange_seconds


def test_the_plan_names_it_on_a_slow_link() -> None:
    """Colocated ps on 2 workers: each sends the dense model once per step."""
    (fast, slow, seconds), _ = workers.run(2, planned)
    assert (fast, slow) == (False, True)
    size_bytes = sum(param.nbytes for param in mlp().parameters())
    assert seconds == pytest.approx(size_bytes * 8 / 1e4, rel=1e-6)
