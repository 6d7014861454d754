"""Training with stragglers=drop and consistency=ssp or async: who is waited for, what comes of it, what is refused."""

from __future__ import annotations

import copy
import itertools
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

import poseidon.torch as poseidon
import workers
from poseidon.errors import InvalidArgument, PoseidonError
from poseidon.launch import free_port
from poseidon.torch.process.context import context
from torch_cases import all_equal, assert_close, mean_loss, mlp, mlp_batch, own_rows, parameters_digest
from waiting import compute_for, wait_for

WORLD_SIZE = 3
SLOW = 2
WARM_UP = 12  # steps in which servers drop nobody, and some
DROP = {"stragglers": "drop", "chunk_bytes": 1 << 20, "small_bytes": 0}


def make_optimizer(module: nn.Module) -> Optimizer:
    return SGD(module.parameters(), lr=0.05, momentum=0.9)


def own_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = mlp_batch(number, 4 * poseidon.world_size())
    return own_rows(inputs), own_rows(targets)


@dataclass
class Training:
    """What a rank has seen."""

    digest: str = ""
    batches: int = 0
    steps: int = 0
    # Of each step: which batch this rank had, if any, and the layers for which it was late.
    sources: list[tuple[int | None, set[str]]] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    reported: dict[int, int] = field(default_factory=dict)  # late steps by rank, as this process knows


def note_step(training: Training, model: poseidon.DistributedDataParallel, batch: int | None) -> None:
    client = context().client
    assert client is not None
    late = {entry.name for entry in model.synced_parameters if client.layer_stats(entry.layer).late}
    training.sources.append((batch, late))


def finish(training: Training, model: poseidon.DistributedDataParallel) -> Training:
    poseidon.barrier()
    training.digest = parameters_digest(model.module)
    training.state = copy.deepcopy(model.module.state_dict())
    training.reported = {entry.rank: entry.late_steps for entry in poseidon.straggler_report()}
    return training


def with_a_pause(update: str | None, steps: int) -> Training:
    """A fixed number of batches; the slow rank pauses once."""
    model = poseidon.DistributedDataParallel(mlp())
    optimizer = make_optimizer(model.module)
    if update is not None:
        optimizer = poseidon.DistributedOptimizer(optimizer, model, update)
    training = Training()
    for step in range(steps):
        optimizer.zero_grad()
        loss = mean_loss(model, *own_batch(step))
        compute_for(0.3 if poseidon.rank() == SLOW and step == WARM_UP else 0.005)
        loss.backward()
        if update is None:  # the exchange is over
            note_step(training, model, step)
        optimizer.step()
    return finish(training, model)


@pytest.mark.parametrize("update", [None, "worker", "server"])
def test_replicas_are_equal_and_the_others_did_not_wait(update: str | None) -> None:
    answers = workers.run(WORLD_SIZE, with_a_pause, update, 2 * WARM_UP, **DROP)
    assert all_equal([answer.digest for answer in answers])
    assert all(answer.reported[SLOW] > 0 for answer in answers)
    assert answers[SLOW].reported[SLOW] >= max(answer.reported[SLOW] for answer in answers)


def replayed(answers: list[Training], schedule: bool) -> nn.Module:
    """What one process makes of the gradients that counted."""
    module = mlp()
    optimizer = make_optimizer(module)
    scheduler = falling(optimizer) if schedule else None
    for sources in zip(*(answer.sources for answer in answers), strict=True):
        gradients: dict[str, list[torch.Tensor]] = {name: [] for name, _ in module.named_parameters()}
        for rank, (batch, late) in enumerate(sources):
            if batch is None:
                continue
            optimizer.zero_grad()
            inputs, targets = (part.chunk(WORLD_SIZE)[rank] for part in mlp_batch(batch, 4 * WORLD_SIZE))
            mean_loss(module, inputs, targets).backward()
            for name, param in module.named_parameters():
                if name not in late:
                    gradients[name].append(param.grad.clone())
        for name, param in module.named_parameters():
            assert len(gradients[name]) > WORLD_SIZE // 2
            param.grad = torch.stack(gradients[name]).mean(0)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return module


def trained(answer: Training) -> nn.Module:
    module = mlp()
    module.load_state_dict(answer.state)
    return module


def test_what_is_dropped_is_left_out_of_the_mean() -> None:
    answers = workers.run(WORLD_SIZE, with_a_pause, None, 2 * WARM_UP, **DROP)
    assert any(late for _, late in answers[SLOW].sources)
    assert_close(trained(answers[0]), replayed(answers, schedule=False))


def falling(optimizer: Optimizer) -> StepLR:
    return StepLR(optimizer, step_size=5, gamma=0.8)


def catching_up(update: str, slow: int, steps: int) -> Training:
    """A fixed number of steps; one rank is slow all the time, and the learning rate falls."""
    model = poseidon.DistributedDataParallel(mlp())
    optimizer = poseidon.DistributedOptimizer(make_optimizer(model.module), model, update)
    scheduler = falling(optimizer)
    training = Training()

    def finish_step(batch: int | None) -> None:
        optimizer.step()
        optimizer.synchronize()  # or the layers would tell of the step before
        note_step(training, model, batch)
        scheduler.step()

    while optimizer.step_count < steps:
        optimizer.zero_grad()
        loss = mean_loss(model, *own_batch(training.batches))
        compute_for(0.06 if poseidon.rank() == slow and training.batches > WARM_UP else 0.01)
        loss.backward()
        finish_step(training.batches)
        training.batches += 1
        for number in optimizer.missed_steps():
            assert number == optimizer.step_count
            finish_step(None)
    assert scheduler.last_epoch == optimizer.step_count
    training.steps = optimizer.step_count
    return finish(training, model)


@pytest.mark.parametrize(("update", "slow"), [("worker", SLOW), ("worker", 0), ("server", SLOW)])
def test_catching_up_ends_together(update: str, slow: int) -> None:
    answers = workers.run(WORLD_SIZE, catching_up, update, slow, 50, **DROP)
    assert all_equal([answer.digest for answer in answers])
    assert [answer.steps for answer in answers] == [50] * WORLD_SIZE
    assert answers[slow].batches < 50
    assert_close(trained(answers[0]), replayed(answers, schedule=True))


def scaled(steps: int) -> tuple[str, int, int]:
    """Rank 0's losses overflow now and then; a digest, the steps made, and those missed that the scaler left out."""
    model = poseidon.DistributedDataParallel(mlp())
    optimizer = poseidon.DistributedOptimizer(make_optimizer(model.module), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    left_out = 0
    for number in itertools.count():
        optimizer.zero_grad()
        loss = mean_loss(model, *own_batch(number))
        compute_for(0.06 if poseidon.rank() == SLOW and number > WARM_UP else 0.01)
        overflows = poseidon.rank() == 0 and number > WARM_UP and number % 3 == 0
        scaler.scale(loss * float("inf") if overflows else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        for before in optimizer.missed_steps():
            scaler.step(optimizer)
            scaler.update()
            left_out += optimizer.step_count == before
        if optimizer.step_count >= steps:
            poseidon.barrier()
            return parameters_digest(model.module), optimizer.step_count, left_out
    raise AssertionError


def test_missed_steps_that_a_scaler_leaves_out() -> None:
    answers = workers.run(WORLD_SIZE, scaled, 40, **DROP)
    assert all_equal([digest for digest, *_ in answers])
    assert [steps for _, steps, _ in answers] == [40] * WORLD_SIZE
    assert answers[SLOW][2] > 0


def forgotten_step(went_on: Path) -> str:
    """What the slow rank is told; the others have few enough steps not to wait for it."""
    poseidon.init(**DROP)
    model = poseidon.DistributedDataParallel(mlp())
    optimizer = poseidon.DistributedOptimizer(make_optimizer(model.module), model)
    for number in range(WARM_UP + 4):
        optimizer.zero_grad()
        loss = mean_loss(model, *own_batch(number))
        if poseidon.rank() != SLOW and number == WARM_UP + 3:
            went_on.touch()
        if poseidon.rank() == SLOW and number == WARM_UP:
            wait_for(went_on)
        loss.backward()
        optimizer.step()
        if poseidon.rank() == SLOW and number == WARM_UP:
            optimizer.synchronize()  # who is late for the first time does not wait for the answers that say so
            with pytest.raises(PoseidonError) as caught:
                list(optimizer.missed_steps())
            return str(caught.value)
    return ""


def test_missed_steps_that_the_loop_forgets(tmp_path: Path) -> None:
    answer = workers.run_fresh(WORLD_SIZE, forgotten_step, tmp_path / "others went on")[SLOW]
    assert isinstance(answer, str), answer
    assert "call step() for every item" in answer


def never_behind() -> list[int]:
    model = poseidon.DistributedDataParallel(mlp())
    optimizer = poseidon.DistributedOptimizer(make_optimizer(model.module), model)
    mean_loss(model, *own_batch(0)).backward()
    optimizer.step()
    return list(optimizer.missed_steps())


def test_without_drop_there_is_nothing_to_catch_up() -> None:
    assert workers.run(2, never_behind) == [[], []]
    assert workers.run(1, never_behind) == [[]]


@dataclass
class Clock:
    """When a rank pushed each step and got the answers, and what it had in the end."""

    pushed: list[float]
    answered: list[float]
    digest: str
    losses: tuple[float, float]  # on this rank's rows, before and after


def own_loss(model: nn.Module) -> float:
    with torch.no_grad():
        return sum(mean_loss(model, *own_batch(number)).item() for number in range(4))


def loosely(steps: int) -> Clock:
    model = poseidon.DistributedDataParallel(mlp())
    inner = SGD(model.module.parameters(), lr=0.02, momentum=0.5, nesterov=True, weight_decay=0.001)
    optimizer = poseidon.DistributedOptimizer(inner, model, update="server")
    pushed, answered = [], []
    before = own_loss(model)
    poseidon.barrier()
    for step in range(steps):
        optimizer.zero_grad()
        loss = mean_loss(model, *own_batch(step % 4))
        compute_for(0.05 if poseidon.rank() == SLOW else 0.001)
        pushed.append(time.monotonic())
        loss.backward()
        answered.append(time.monotonic())
        optimizer.step()
    optimizer.pull_parameters()
    after = own_loss(model)
    optimizer.zero_grad()
    mean_loss(model, *own_batch(0)).backward()  # goes on after a pull
    optimizer.step()
    optimizer.pull_parameters()
    return Clock(pushed, answered, parameters_digest(model.module), (before, after))


def lead(clocks: list[Clock]) -> int:
    """By how many steps rank 0's answer was ahead of the slow rank's pushes, at most."""
    slow = clocks[SLOW].pushed
    return max(step - sum(moment <= at for moment in slow) + 1 for step, at in enumerate(clocks[0].answered))


def test_bounded_staleness_keeps_its_bound() -> None:
    clocks = workers.run(WORLD_SIZE, loosely, 20, consistency="ssp", staleness=2)
    assert all_equal([clock.digest for clock in clocks])
    assert 1 <= lead(clocks) <= 2


def test_without_a_bound_nobody_waits() -> None:
    clocks = workers.run(WORLD_SIZE, loosely, 20, consistency="async")
    assert all_equal([clock.digest for clock in clocks])
    assert lead(clocks) > 5
    assert all(after < before for before, after in (clock.losses for clock in clocks))


def refused(text: str) -> Any:
    return pytest.raises(InvalidArgument, match=text)


def refusals_of_drop() -> None:
    with_buffers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with refused("pass broadcast_buffers=False"):
        poseidon.DistributedDataParallel(with_buffers)
    poseidon.DistributedDataParallel(with_buffers, broadcast_buffers=False)
    with refused("parameter 0.weight has scheme sfb.*use auto or ps"):
        poseidon.DistributedDataParallel(mlp(), scheme="sfb")
    model = poseidon.DistributedDataParallel(mlp())
    assert {row.scheme for row in model.plan()} == {"ps"}
    with refused("exclude each other.*as many batches"), model.join():
        pass
    half = poseidon.DistributedOptimizer(SGD(list(model.module.parameters())[:2], lr=0.1), model)
    with refused("parameter 4.bias.*one optimizer"):
        next(half.missed_steps())


def refusals_of_ssp() -> None:
    model = poseidon.DistributedDataParallel(mlp())
    params = list(model.module.parameters())
    with refused("pass update='server'"):
        poseidon.DistributedOptimizer(SGD(params, lr=0.1), model)
    with refused("Adam scales its updates.*torch.optim.SGD"):
        poseidon.DistributedOptimizer(Adam(params), model, update="server")
    with refused("update of parameter 4.bias on the workers.*update='server'"):
        model(mlp_batch(0, 2)[0])
    optimizer = poseidon.DistributedOptimizer(SGD(params, lr=0.1), model, update="server")
    mean_loss(model, *own_batch(0)).backward()
    with pytest.raises(PoseidonError, match=r"call it after step\(\)"):
        optimizer.pull_parameters()
    optimizer.step()


def test_refusals() -> None:
    workers.run(2, refusals_of_drop, stragglers="drop")
    workers.run(2, refusals_of_ssp, consistency="ssp")


@pytest.mark.parametrize(
    "options",
    [
        {"stragglers": "drop", "consistency": "ssp"},
        {"stragglers": "drop", "on_failure": "rejoin"},
        {"consistency": "async", "on_failure": "shrink"},
        {"stragglers": "drop", "aggregation": "wide"},
        {"stragglers": "drop", "reduce_order": "arrival"},
        {"stragglers": "drop", "assignment": "worker"},
    ],
    ids=lambda options: "-".join(itertools.chain(*options.items())),
)
def test_options_that_exclude_each_other(options: dict[str, str]) -> None:
    place = {"rank": 0, "world_size": 2, "master_addr": "127.0.0.1", "master_port": free_port()}
    with pytest.raises(InvalidArgument) as raised:
        poseidon.init(**place, **options, timeout=1)
    assert all(name in str(raised.value) for name in options)
