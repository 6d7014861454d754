"""What Recovery refuses, what it lets through, and what a program may do with it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import poseidon.torch as poseidon
from poseidon.errors import InvalidArgument
from poseidon.torch.recovery.objects import TrainingObjects
from recovery_cases import Fault, Supervisor, batch, network, parameters_and_state, train
from test_torch_recovery import PLAIN, SIZE, STEPS, undisturbed
from waiting import SLOWED


def parts() -> tuple[poseidon.DistributedDataParallel, torch.optim.Optimizer]:
    poseidon.init()
    model = poseidon.DistributedDataParallel(network(""))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model: nn.Module, step: int = 0) -> torch.Tensor:
    inputs, target = batch(step, poseidon.rank(), poseidon.world_size())
    return nn.functional.mse_loss(model(inputs), target)


def error_of(act: Callable[[], Any]) -> str:
    """The class and text of what `act` raises."""
    try:
        act()
    except poseidon.PoseidonError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def misuses(folder: Path) -> list[str]:
    """Nothing of this needs another worker: none is waited for before Recovery is well made."""
    model, optimizer = parts()
    late = poseidon.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    partly = poseidon.DistributedDataParallel(network(""))
    poseidon.DistributedOptimizer(torch.optim.SGD(list(partly.parameters())[4:], lr=0.1), partly)
    return [
        error_of(poseidon.barrier),
        error_of(lambda: poseidon.broadcast(torch.ones(2))),
        error_of(lambda: poseidon.all_reduce(0.5)),
        error_of(lambda: loss_of(model)),
        error_of(lambda: poseidon.DistributedOptimizer(optimizer, model, update="server")),
        error_of(lambda: poseidon.DistributedOptimizer(optimizer, model, max_norm=1.0, clip="previous")),
        error_of(lambda: poseidon.Recovery(optimizer, model)),
        error_of(lambda: poseidon.Recovery(model, optimizer, 5)),
        error_of(lambda: poseidon.Recovery(model, optimizer, optimizer)),
        error_of(lambda: poseidon.Recovery(model, late, undo=False)),
        error_of(lambda: poseidon.Recovery(model, optimizer)),
        error_of(lambda: poseidon.Recovery(partly)),
        error_of(lambda: poseidon.Recovery(model, late, every=0)),
        error_of(lambda: poseidon.Recovery(model, late, directory="/proc/none")),
        error_of(lambda: model.join().__enter__()),
    ]


def test_misuse_is_refused_before_anybody_is_waited_for(tmp_path: Path) -> None:
    words = [
        "barrier() before",
        "broadcast() before",
        "all_reduce() before",
        "give it the model",
        "update='worker'",
        "clip='gathered'",
        "DistributedDataParallel first",
        "state_dict()",
        "twice",
        "undo=False",
        "not given the DistributedOptimizer that updates 0.weight",
        "not given the DistributedOptimizer that updates 3.weight",
        "every is 0",
        "directory",
        "join()",
    ]
    for texts in Supervisor(tmp_path, 2).run(misuses):
        for text, word in zip(texts, words, strict=True):
            assert word in text
            assert text.startswith(("InvalidArgument", "PoseidonError"))


def different(folder: Path) -> str:
    model, optimizer = parts()
    rest = [torch.optim.lr_scheduler.StepLR(optimizer, 3)] if poseidon.rank() == 1 else []
    return error_of(lambda: poseidon.Recovery(model, optimizer, *rest))


def test_ranks_with_different_objects_are_told(tmp_path: Path) -> None:
    for text in Supervisor(tmp_path, 2).run(different):
        assert text.startswith("Mismatch")
        assert "StepLR" in text


def exchange_after_update(folder: Path) -> str:
    model, optimizer = parts()
    recovery = poseidon.Recovery(model, optimizer, undo=False)

    def attempt() -> None:
        with recovery.attempt():
            loss_of(model).backward()
            optimizer.step()
            poseidon.barrier()

    return error_of(attempt)


def test_without_undo_nothing_may_be_exchanged_after_an_update(tmp_path: Path) -> None:
    texts = Supervisor(tmp_path, 2, POSEIDON_TIMEOUT=str(2 * SLOWED)).run(exchange_after_update)
    assert any("undo=False" in text for text in texts), "the other one may have been told before it came so far"


def test_without_undo_the_usual_loop_is_as_safe(tmp_path: Path) -> None:
    faults = [Fault(1, 2, "backward"), Fault(0, 4, "after step"), Fault(2, 5, "exchange", 0.0005)]
    answers = Supervisor(tmp_path, SIZE).run(train, PLAIN, STEPS, faults, None, False)
    assert {answer["digest"] for answer in answers} == {undisturbed(PLAIN)}


def catches_its_own_errors(folder: Path) -> str:
    """As `train`, but one rank fails now and then, after it has updated, and goes on."""
    poseidon.init()
    module = network("dropout")
    model = poseidon.DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    recovery = poseidon.Recovery(model, optimizer, scheduler, seed=7)
    left = [2, 3, 5] if poseidon.rank() == 1 else []
    while recovery.until(STEPS):
        try:
            with recovery.attempt():
                loss_of(model, recovery.step).backward()
                optimizer.step()
                scheduler.step()
                if recovery.step in left:
                    left.remove(recovery.step)
                    raise ValueError("a broken picture")
        except ValueError:
            pass
    return parameters_and_state(module, optimizer)


def test_a_program_that_catches_its_own_error_goes_on(tmp_path: Path) -> None:
    assert set(Supervisor(tmp_path, SIZE).run(catches_its_own_errors)) == {undisturbed(PLAIN)}


def without_seed(folder: Path) -> tuple[list[float], int]:
    poseidon.init()
    torch.manual_seed(poseidon.rank())
    model = poseidon.DistributedDataParallel(network(""))
    recovery = poseidon.Recovery(model, torch.optim.SGD(model.parameters(), lr=0.1))
    drawn: dict[int, float] = {}
    fails = poseidon.rank() == 1
    while recovery.until(4):
        try:
            with recovery.attempt():
                drawn[recovery.step] = torch.rand(()).item()
                if recovery.step == 2 and fails:
                    fails = False
                    raise ValueError
                loss_of(model).backward()
        except ValueError:
            pass
    return [drawn[step] for step in range(4)], len(recovery.history)


def test_without_a_seed_random_numbers_are_drawn_again(tmp_path: Path) -> None:
    for rank, (drawn, failures) in enumerate(Supervisor(tmp_path, 2).run(without_seed)):
        torch.manual_seed(rank)
        network("")  # seeds for itself
        assert drawn == [torch.rand(()).item() for _ in range(4)]
        assert failures == 1


def without_optimizer(folder: Path) -> list[str]:
    model, _ = parts()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        poseidon.Recovery(model)
    return [str(warning.message) for warning in caught]


def test_a_forgotten_optimizer_is_warned_of(tmp_path: Path) -> None:
    for texts in Supervisor(tmp_path, 2).run(without_optimizer):
        assert any("no optimizer of parameter 0.weight" in text for text in texts)


def test_the_state_of_another_version_is_refused_before_anything_is_changed() -> None:
    model, optimizer = parts()
    try:
        objects = TrainingObjects([model, optimizer], seed=None, recovers=False, undo=False)
        state = objects.collect(0)
        before = [param.clone() for param in model.parameters()]
        old = {**state["models"][0], "tensors": [tensor + 1 for tensor in state["models"][0]["tensors"]]}
        del old["dense history"]
        text = error_of(lambda: objects.load({**state, "models": [old]}, 0))
        assert text.startswith("Mismatch: the state is that of another version of Poseidon: start all workers from")
        assert all(map(torch.equal, model.parameters(), before))
        objects.load(state, 0)
    finally:
        poseidon.shutdown()


def test_a_single_worker_needs_nobody() -> None:
    poseidon.init(on_failure="rejoin")
    try:
        model = poseidon.DistributedDataParallel(nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recovery = poseidon.Recovery(model, optimizer)
        made = []
        while recovery.until(3):
            with recovery.attempt():
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
                made.append(recovery.step)
        assert made == [0, 1, 2]
        with pytest.raises(InvalidArgument), recovery.attempt():
            raise InvalidArgument("passes through")
    finally:
        poseidon.shutdown()
