"""Updates on the servers: checkpoints move both ways, edits are pushed, and what cannot be exact is an error."""

from __future__ import annotations

import copy
import gc
import io
import os
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

import poseidon.torch as poseidon
import workers
from test_torch_server_update import SPECS, Spec, assert_same_bits, assert_same_state, step_once, wrapped
from torch_cases import all_equal, mean_loss, mlp, mlp_batch, own_rows, parameters_digest


def through_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def resume(spec: Spec, first_on_server: bool, then_on_server: bool) -> str:
    """Three steps, a checkpoint, three steps of others that loaded it: as six steps in one go."""
    straight, straight_optimizer = wrapped(spec, server=False)
    model, optimizer = wrapped(spec, first_on_server)
    for step in range(3):
        step_once(straight, straight_optimizer, step)
        step_once(model, optimizer, step)
    saved = through_file([model.state_dict(), optimizer.state_dict()])
    assert_same_state(saved[1], straight_optimizer.state_dict())
    model, optimizer = wrapped(spec, then_on_server)
    step_once(model, optimizer, 77)  # leaves state that the checkpoint must replace
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    for step in range(3, 6):
        step_once(straight, straight_optimizer, step)
        step_once(model, optimizer, step)
        assert_same_bits(model, straight, f"{spec}, step {step}")
    assert_same_state(optimizer.state_dict(), straight_optimizer.state_dict())
    return parameters_digest(model)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("ways", [(True, True), (True, False), (False, True)])
def test_checkpoints_move_between_both_updates(ways: tuple[bool, bool], world_size: int) -> None:
    for spec in (SPECS[0], SPECS[3], SPECS[9]):
        assert all_equal(workers.run(world_size, resume, spec, *ways))


def bad_state(optimizer: Optimizer) -> Any:
    """A checkpoint of another model."""
    state = copy.deepcopy(optimizer.state_dict())
    name = "momentum_buffer" if "momentum_buffer" in state["state"][0] else "exp_avg"
    state["state"][0][name] = torch.zeros(3)
    return state


def resume_from_nothing(spec: Spec) -> str:
    """A checkpoint made before the first step leaves no state behind."""
    fresh, fresh_optimizer = wrapped(spec, server=False)
    model, optimizer = wrapped(spec)
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    assert_same_state(saved[1], fresh_optimizer.state_dict())
    step_once(model, optimizer, 5)
    model.load_state_dict(saved[0])
    with pytest.raises(poseidon.PoseidonError, match=r"0\.weight has shape \(3,\)"):
        optimizer.load_state_dict(bad_state(optimizer))
    optimizer.load_state_dict(saved[1])
    for step in range(2):
        step_once(fresh, fresh_optimizer, step)
        step_once(model, optimizer, step)
        assert_same_bits(model, fresh)
    return parameters_digest(model)


def test_a_checkpoint_without_state_clears_it() -> None:
    for spec in (SPECS[3], SPECS[6]):
        assert all_equal(workers.run(2, resume_from_nothing, spec))


def one_rank_saves(spec: Spec) -> str:
    """state_dict() is not collective, whatever the others do meanwhile; the state stays as it is."""
    model, optimizer = wrapped(spec)
    reference, reference_optimizer = wrapped(spec, server=False)
    for step in range(4):
        step_once(model, optimizer, step)
        if poseidon.rank() == step % 2:
            saved = optimizer.state_dict()
        step_once(reference, reference_optimizer, step)
        if poseidon.rank() == step % 2:
            assert_same_state(saved, reference_optimizer.state_dict())
    assert_same_bits(model, reference)
    return parameters_digest(model)


def test_any_rank_saves_alone() -> None:
    assert all_equal(workers.run(2, one_rank_saves, SPECS[9]))


def wrapped_late(spec: Spec) -> str:
    """An optimizer that has stepped, and a scheduler that knows it, go on when the servers take over."""
    straight, straight_optimizer = wrapped(spec, server=False)
    model, inner = wrapped(spec, server=False)
    schedulers = [StepLR(one, 1, 0.5) for one in (straight_optimizer, inner)]
    optimizer = inner
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # schedulers warn of a step() that they did not see
        for step in range(4):
            if step == 2:
                inner.zero_grad()
                optimizer = poseidon.DistributedOptimizer(inner, model, update="server")
                assert not inner.state or poseidon.world_size() == 1
            step_once(straight, straight_optimizer, step)
            step_once(model, optimizer, step)
            for scheduler in schedulers:
                scheduler.step()
            assert_same_bits(model, straight, step)
    assert_same_state(optimizer.state_dict(), straight_optimizer.state_dict())
    return parameters_digest(model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_state_is_handed_over(world_size: int) -> None:
    for spec in (SPECS[4], SPECS[7]):
        assert all_equal(workers.run(world_size, wrapped_late, spec))


def edit_parameters(spec: Spec) -> str:
    model, optimizer = wrapped(spec)
    reference, reference_optimizer = wrapped(spec, server=False)
    for step in range(4):
        for part in (model, reference):
            with torch.no_grad():
                part.module[0].weight.clamp_(-0.05, 0.05)
        if poseidon.world_size() > 1:
            with pytest.raises(poseidon.PoseidonError, match=r"0\.weight was changed.*push_parameters"):
                step_once(model, optimizer, step)
        optimizer.push_parameters()
        step_once(model, optimizer, step)
        step_once(reference, reference_optimizer, step)
        assert_same_bits(model, reference)
    if poseidon.rank() == 1:
        nn.init.zeros_(model.module[0].weight)
    optimizer.push_parameters()  # rank 0's count
    assert_same_bits(model, reference)
    return parameters_digest(model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_edited_parameters_are_pushed(world_size: int) -> None:
    for spec in (SPECS[3], SPECS[6]):
        assert all_equal(workers.run(world_size, edit_parameters, spec))


# What is refused.


class OwnStep(SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Renamed(AdamW):
    pass


def kinds_refused() -> None:
    module = mlp()
    model = poseidon.DistributedDataParallel(module)

    def refused(make: Callable[[], Optimizer], text: str, update: str | None = "server", target: Any = model) -> None:
        with pytest.raises(poseidon.PoseidonError, match=text):
            poseidon.DistributedOptimizer(make(), target, update=update)

    params = list(module.parameters())
    refused(lambda: torch.optim.RMSprop(params), "cannot run RMSprop: .*SGD, Adam and AdamW")
    refused(lambda: OwnStep(params, lr=0.1), "cannot run OwnStep")
    refused(lambda: Renamed(params), "cannot run Renamed: .*not subclasses")
    refused(lambda: Adam(params, amsgrad=True), "group 0 has amsgrad=True")
    halves: list[dict[str, Any]] = [{"params": params[:1]}, {"params": params[1:], "differentiable": True}]
    refused(lambda: SGD(halves, lr=0.1), "parameter group 1 has differentiable=True")
    with_another: list[Any] = [*params, torch.ones(3, requires_grad=True)]
    refused(lambda: SGD(with_another, lr=0.1), "parameter 6 of group 0 .* not synchronized")
    refused(lambda: SGD(params, lr=0.1), "update is 'both': pass 'worker' .* or 'server'", "both")
    refused(lambda: SGD(params, lr=0.1), "not a Sequential", target=module)
    half = poseidon.DistributedDataParallel(mlp(torch.float16))
    refused(lambda: SGD(half.parameters(), lr=0.1), "4.weight|0.weight has dtype torch.float16", target=half)
    for shared in (mlp(), nn.Linear(48, 4)):
        shared.again = nn.Parameter(next(shared.parameters()).detach()[1:])
        other = poseidon.DistributedDataParallel(shared)
        refused(lambda: SGD(other.parameters(), lr=0.1), "share memory", target=other)  # noqa: B023
    optimizer = poseidon.DistributedOptimizer(AdamW(params), model, update="server")
    with pytest.raises(poseidon.PoseidonError, match="add all parameter groups"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(poseidon.PoseidonError, match=r"save state_dict\(\)"):
        copy.deepcopy(optimizer)
    assert "AdamW" in repr(optimizer)
    if poseidon.world_size() > 1:
        with pytest.raises(poseidon.PoseidonError, match="join"), model.join():
            pass


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_servers_cannot_update_is_refused(world_size: int) -> None:
    workers.run(world_size, kinds_refused)


def begin_misuse(name: str, model: Any, optimizer: Any) -> Callable[[], Any]:
    """Trains up to the call that is wrong, and returns that."""
    inputs, targets = map(own_rows, mlp_batch(0, 4 * poseidon.world_size()))
    if name == "scaled":
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(mean_loss(model, inputs, targets)).backward()
        return lambda: scaler.step(optimizer)
    loss = mean_loss(model, inputs, targets)
    if name == "backward in no_sync":
        with model.no_sync():
            mean_loss(model, inputs, targets).backward()
        return optimizer.step
    loss.backward()
    if name == "second backward":
        sum(param.sum() for param in model.parameters()).backward()
    if name == "second forward":
        return lambda: model(inputs)
    if name == "second forward in a closure":
        return lambda: optimizer.step(lambda: mean_loss(model, inputs, targets).backward())
    if name == "second step":
        optimizer.step()
    elif name == "other learning rate":
        optimizer.param_groups[0]["lr"] *= 2
    elif name == "clipped":
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    return optimizer.step


def misuse(name: str) -> str:
    model, optimizer = wrapped(SPECS[6])
    wrong = begin_misuse(name, model, optimizer)
    with pytest.raises(poseidon.PoseidonError) as caught:
        wrong()
    return str(caught.value)


MISUSES = {
    "second backward": r"a change of .*\.grad between backward and step\(\)",
    "second forward": "a forward pass came between backward and step",
    "second forward in a closure": "a forward pass came between backward and step",
    "second step": "without a synchronizing backward",
    "backward in no_sync": "without a synchronizing backward",
    "other learning rate": "hyperparameters of parameter group 0 changed",
    "clipped": r"a change of .*\.grad between backward and step\(\)",
    "scaled": "GradScaler and update='server' exclude each other",
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_an_error(name: str) -> None:
    for text in workers.run(2, misuse, name):
        assert re.search(MISUSES[name], text), text


def harmless() -> str:
    """What looks like misuse and is not."""
    model, optimizer = wrapped(SPECS[4])
    reference, reference_optimizer = wrapped(SPECS[4], server=False)
    optimizer.step()  # nothing to do yet
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for step in range(3):
        inputs, targets = map(own_rows, mlp_batch(step, 4 * poseidon.world_size()))

        def closure(part: nn.Module) -> float:
            part.zero_grad()
            loss = mean_loss(part, inputs, targets)  # noqa: B023
            loss.backward()
            return loss.item()

        assert optimizer.step(lambda: closure(model)) == reference_optimizer.step(lambda: closure(reference))
        with torch.no_grad():
            model(inputs)
        optimizer.zero_grad()
        reference_optimizer.zero_grad()
        assert_same_bits(model, reference)
    assert calls == ["before", "after"] * 3
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    mean_loss(model, inputs, targets).backward()
    disabled.step(optimizer)
    return parameters_digest(model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_closures_hooks_and_evaluation(world_size: int) -> None:
    assert all_equal(workers.run(world_size, harmless))


class ReadsLater(nn.Module):
    """The first layer's backward needs the last one's weight, behind autograd's back: detached."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(48, 48), nn.Linear(48, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.inner(x)) * self.out.weight.detach()[0])


def reads_later() -> str:
    torch.manual_seed(0)
    model = poseidon.DistributedDataParallel(ReadsLater())
    poseidon.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model, update="server")
    inputs, targets = map(own_rows, mlp_batch(0, 8))
    with pytest.raises(RuntimeError) as caught:
        mean_loss(model, inputs, targets).backward()
    return str(caught.value)


def different_optimizers() -> str:
    model = poseidon.DistributedDataParallel(mlp())
    optimizer = SGD(model.parameters(), lr=0.1 * (1 + poseidon.rank()))
    with pytest.raises(poseidon.PoseidonError) as caught:
        poseidon.DistributedOptimizer(optimizer, model, update="server")
    return str(caught.value)


def momentum_begins(dampening: float) -> str:
    model, optimizer = wrapped((SGD, {"lr": 0.01, "dampening": dampening}))
    reference, reference_optimizer = wrapped((SGD, {"lr": 0.01, "dampening": dampening}), server=False)
    for step in range(4):
        for part, stepping in ((model, optimizer), (reference, reference_optimizer)):
            stepping.param_groups[0]["momentum"] = 0.9 if step > 1 else 0.0
            step_once(part, stepping, step)
        assert_same_bits(model, reference)
    return parameters_digest(model)


def test_differences_between_ranks_and_late_surprises() -> None:
    for text in workers.run(2, different_optimizers):
        assert "the ranks built different optimizers" in text
        assert "'lr': 0.2" in text
    assert all_equal(workers.run(2, momentum_begins, 0.0))
    with pytest.raises(workers.WorkerError, match="got a momentum after updates without one"):
        workers.run(2, momentum_begins, 0.5)
    for failure in workers.run_fresh(2, _initialized, reads_later):
        assert "modified by an inplace operation" in failure, failure


def _initialized(function: Callable[[], str]) -> str:
    poseidon.init()
    return function()


def threads_and_descriptors() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def jobs_one_after_the_other() -> list[tuple[int, int]]:
    """Gradients stay uncleared, so that their stand-ins live as long as the parameters."""
    counts = []
    for _ in range(3):
        poseidon.init()
        model = poseidon.DistributedDataParallel(mlp())
        optimizer = poseidon.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model, update="server")
        mean_loss(model, *map(own_rows, mlp_batch(0, 4 * poseidon.world_size()))).backward()
        optimizer.step()
        poseidon.shutdown()
        del model, optimizer
        gc.collect()
        counts.append(threads_and_descriptors())
    return counts


def test_a_job_leaves_no_thread_or_descriptor() -> None:
    for counts in workers.run_fresh(2, jobs_one_after_the_other):
        assert counts[0] == counts[1] == counts[2]
