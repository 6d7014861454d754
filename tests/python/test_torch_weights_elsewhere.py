"""Workers with batches of different sizes that are lost and replaced, or that train by LocalSGD."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poseidon.torch as poseidon
import workers
from poseidon.errors import InvalidArgument, PoseidonError
from recovery_cases import Fault, Faults, Supervisor
from torch_cases import all_equal, assert_close, mlp, mlp_batch, parameters_digest
from waiting import SLOWED

STEPS = 6
FACTORS = {"POSEIDON_SMALL_BYTES": "256"}


def rows_of(step: int, size: int) -> list[int]:
    """Others in each step; one rank has none in some."""
    return [(2 * rank + step) % 4 + (rank == 0) for rank in range(size)]


def loss_of(model: nn.Module, step: int, rank: int, size: int) -> torch.Tensor:
    rows = rows_of(step, size)
    inputs, targets = (part.split(rows)[rank] for part in mlp_batch(step, sum(rows)))
    return F.mse_loss(model(inputs), targets) if rows[rank] else 0 * model(torch.ones(1, 48)).sum()


def alone(sizes: list[int]) -> list[torch.Tensor]:
    """One process on all rows."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, size in enumerate(sizes):
        inputs, targets = mlp_batch(step, sum(rows_of(step, size)))
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def train(folder: Path, overlapped: bool, machines: str, faults: list[Fault]) -> dict[str, Any]:
    """`machines`: by RANK, the label of its machine."""
    dies = Faults(folder, faults)
    poseidon.init(machine=machines[int(os.environ["RANK"])])
    model = poseidon.DistributedDataParallel(mlp())
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if overlapped:
        optimizer = poseidon.DistributedOptimizer(optimizer, model)
    recovery = poseidon.Recovery(model, optimizer)
    sizes: dict[int, int] = {}
    while recovery.until(STEPS):
        with recovery.attempt():
            step, rank, size = recovery.step, poseidon.rank(), poseidon.world_size()
            model.set_weight(rows_of(step, size)[rank])
            dies.reached("weights", step)
            optimizer.zero_grad()
            loss = loss_of(model, step, rank, size)
            dies.reached("exchange", step)
            loss.backward()
            optimizer.step()
            dies.reached("after step", step)
            sizes[step] = size
    if overlapped:
        optimizer.synchronize()  # type: ignore[attr-defined]
    return {"parameters": [param.tolist() for param in model.parameters()], "sizes": sizes}


def check(answers: list[dict[str, Any]], sizes: list[int]) -> None:
    assert all_equal([answer["parameters"] for answer in answers])
    for own, expected in zip(answers[0]["parameters"], alone(sizes), strict=True):
        torch.testing.assert_close(torch.tensor(own), expected)


@pytest.mark.parametrize(("overlapped", "machines"), [(False, "aaa"), (True, "aab")])
def test_workers_that_are_replaced_keep_the_mean_over_rows(tmp_path: Path, overlapped: bool, machines: str) -> None:
    faults = [Fault(1, 1, "weights"), Fault(0, 2, "exchange", 0.0005), Fault(2, 4, "after step")]
    supervisor = Supervisor(tmp_path, 3, **FACTORS)
    check(supervisor.run(train, overlapped, machines, faults), [3] * STEPS)
    assert supervisor.restarted == len(faults)


@pytest.mark.parametrize("machines", ["aab", "abb"])
def test_those_who_are_left_have_the_mean_over_their_rows(tmp_path: Path, machines: str) -> None:
    supervisor = Supervisor(tmp_path, 3, restarts=0, POSEIDON_ON_FAILURE="shrink", **FACTORS)
    answers = [
        answer for answer in supervisor.run(train, False, machines, [Fault(1, 3, "weights")]) if answer is not None
    ]
    assert len(answers) == 2
    check(answers, [3, 3, 3, 2, 2, 2])


def train_with_weights_of_before(folder: Path) -> str:
    dies = Faults(folder, [Fault(1, 2, "between")])
    poseidon.init()
    model = poseidon.DistributedDataParallel(mlp())
    with pytest.raises(InvalidArgument, match=r"set_weight before poseidon\.Recovery"):
        model.set_weight(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        recovery = poseidon.Recovery(model, optimizer)
        while recovery.until(4):
            dies.reached("between", recovery.step)
            with recovery.attempt():
                if recovery.step == 0:
                    model.set_weight(1 + poseidon.rank())
                model(torch.ones(1, 48)).sum().backward()
                optimizer.step()
    except Exception as error:
        return str(error)
    return "no error"


def test_weights_of_workers_before_a_replacement_are_refused(tmp_path: Path) -> None:
    # The replacement waits in vain for the one that has failed.
    survivor, _ = Supervisor(tmp_path, 2, POSEIDON_TIMEOUT=str(3 * SLOWED)).run(train_with_weights_of_before)
    assert "workers were replaced since set_weight: call it in each attempt" in survivor


# LocalSGD.


def periods_with_weights(folder: Path, fragments: int, overlap_steps: int, faults: list[Fault]) -> list[Any]:
    """Periods of 4 steps, each with other weights, of which snapshots lie within."""
    dies = Faults(folder, faults)
    poseidon.init()
    model = mlp()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = poseidon.LocalSGD(model, inner, 4, fragments=fragments, overlap_steps=overlap_steps)
    recovery = poseidon.Recovery(optimizer, directory=folder / "snapshots", every=3)
    while recovery.until(12):
        with recovery.attempt():
            step, rank = recovery.step, poseidon.rank()
            if optimizer.steps_alone == 0:
                optimizer.set_weight(1 + (rank + step // 4) % 2)
            optimizer.zero_grad()
            inputs, targets = mlp_batch(2 * step + rank, 2)
            F.mse_loss(model(inputs), targets).backward()
            dies.reached("backward", step)
            optimizer.step()
    optimizer.average()
    return [param.tolist() for param in model.parameters()]


@pytest.mark.parametrize(("fragments", "overlap_steps"), [(1, 0), (2, 1)])
def test_a_loss_within_a_period_keeps_its_weights(tmp_path: Path, fragments: int, overlap_steps: int) -> None:
    found = []
    for name, faults in (("whole", []), ("lost", [Fault(1, 6, "backward")])):
        (tmp_path / name).mkdir()
        supervisor = Supervisor(tmp_path / name, 2)
        found += supervisor.run(periods_with_weights, fragments, overlap_steps, faults)
        assert supervisor.restarted == len(faults)
    assert all_equal(found)


def local_sgd(every: int, outer: bool, fragments: int) -> str:
    """Each rank's rows change from period to period. After each averaging the parameters are those of an emulation."""
    rank, size = poseidon.rank(), poseidon.world_size()
    model = mlp()
    nesterov = poseidon.OuterNesterov(lr=1.0, momentum=0.0) if outer else None
    optimizer = poseidon.LocalSGD(
        model, torch.optim.SGD(model.parameters(), lr=0.1), every, outer=nesterov, fragments=fragments
    )
    replicas = [mlp() for _ in range(size)]
    optimizers = [torch.optim.SGD(replica.parameters(), lr=0.1) for replica in replicas]
    for step in range(4 * every):
        rows = rows_of(step // every, size)
        if optimizer.steps_alone == 0:
            optimizer.set_weight(rows[rank])
        for one, own, other in zip((model, *replicas), (optimizer, *optimizers), (rank, *range(size)), strict=True):
            own.zero_grad()
            F.mse_loss(one(torch.full((1, 48), 0.1 * other)), mlp_batch(step, 1)[1]).backward()
            own.step()
        if (step + 1) % every == 0:
            optimizer.average()
            with torch.no_grad():
                for params in zip(*(replica.parameters() for replica in replicas), strict=True):
                    value = sum(count * param for count, param in zip(rows, params, strict=True)) / sum(rows)
                    for param in params:
                        param.copy_(value)
            if fragments == 1:
                assert_close(model, replicas[0])
    return parameters_digest(model)


@pytest.mark.parametrize(("every", "outer"), [(1, False), (3, False), (3, True)])
def test_averagings_are_means_over_rows(every: int, outer: bool) -> None:
    assert all_equal(workers.run(3, local_sgd, every, outer, 1))


def as_one_process() -> None:
    """Plain SGD that averages after each step."""
    rank, size = poseidon.rank(), poseidon.world_size()
    model, reference = mlp(), mlp()
    optimizer = poseidon.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), every=1)
    whole = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(4):
        rows = rows_of(step, size)
        optimizer.set_weight(rows[rank])
        optimizer.zero_grad()
        loss_of(model, step, rank, size).backward()
        optimizer.step()
        whole.zero_grad()
        F.mse_loss(reference(mlp_batch(step, sum(rows))[0]), mlp_batch(step, sum(rows))[1]).backward()
        whole.step()
        assert_close(model, reference)


def test_local_sgd_at_every_step_is_one_process_on_all_rows() -> None:
    workers.run(2, as_one_process)


def only_one_gives_a_weight() -> str:
    poseidon.init()
    model = mlp()
    optimizer = poseidon.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), every=1)
    if poseidon.rank() == 0:
        optimizer.set_weight(2)
    with pytest.raises(Exception, match="calls of set_weight") as caught:
        optimizer.step()
    if poseidon.rank() == 1:
        optimizer.set_weight(2)  # or rank 0 would wait for it at the end
    return type(caught.value).__name__


def test_a_weight_of_one_rank_alone_is_a_mismatch() -> None:
    assert workers.run_fresh(2, only_one_gives_a_weight) == ["Mismatch"] * 2


def of_drifting_ranks(option: str) -> None:
    model = poseidon.DistributedDataParallel(mlp())
    with pytest.raises(InvalidArgument, match=rf"set_weight\(\) and {option} exclude each other"):
        model.set_weight(2)


@pytest.mark.parametrize("option", ["stragglers=drop", "consistency=ssp"])
def test_ranks_in_different_steps_have_no_mean_over_rows(option: str) -> None:
    workers.run(2, of_drifting_ranks, option, **dict([option.split("=")]))


def two_weights_for_one_averaging() -> list[str]:
    poseidon.init(timeout=10 * SLOWED)
    texts = []
    model = mlp()
    optimizer = poseidon.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), every=2)
    rank = poseidon.rank()
    try:
        for step in range(4):
            if step in (0, 2):
                optimizer.set_weight(3 + step)
            F.mse_loss(model(torch.ones(3, 48)), torch.zeros(3, 4)).backward()
            optimizer.step()
        texts.append("trained")
        for step in range(2):
            optimizer.set_weight(3 + step * rank)
            optimizer.step()
    except PoseidonError as error:
        texts.append(f"{type(error).__name__}: {error}")
    return texts


def test_local_sgd_takes_one_weight_for_an_averaging() -> None:
    first, second = workers.run_fresh(2, two_weights_for_one_averaging)
    assert first[0] == second[0] == "trained"
    assert "rank 1 failed: InvalidArgument" in first[1]
    assert "one weight counts" in second[1]
