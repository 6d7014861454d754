"""Jobs of torch.distributed's process groups: who joins by itself, who with whom, and until when."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import poseidon.torch as poseidon
import workers
from poseidon import _core
from poseidon.adapter.control import Control
from poseidon.adapter.membership import Membership
from poseidon.errors import PoseidonError
from poseidon.torch.process.context import context_of
from torch_cases import parameters_digest
from waiting import wait_until


def start_torch(folder: str, rank: int | None = None, world_size: int | None = None) -> None:
    """Forms torch's group, by default of all processes."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}",
        rank=int(os.environ["RANK"]) if rank is None else rank,
        world_size=int(os.environ["WORLD_SIZE"]) if world_size is None else world_size,
    )


def total(here: Membership) -> int:
    """The sum over the job's workers of 1 + their rank in torch's world."""
    return 0 if here.control is None else here.control.sum([1 + dist.get_rank()])[0]


def place(here: Membership) -> tuple[int, int]:
    return here.rank, here.world_size


def text_of(call: Any, *args: Any) -> str:
    try:
        call(*args)
    except PoseidonError as error:
        return f"{error.code}: {error}"
    return "nothing was raised"


def joins_by_itself(folder: str) -> tuple[Any, ...]:
    before = text_of(context_of)
    start_torch(folder)
    here = context_of()
    same = here is context_of(dist.group.WORLD) and here is context_of(dist.new_group([0, 1, 2]))
    same = same and here is context_of() and poseidon.world_size() == 3
    dist.barrier()  # the new group has connected on all ranks
    dist.destroy_process_group()
    return before, total_of(here), same


def total_of(here: Membership) -> int:
    assert here.control is not None
    return here.control.sum([1])[0]


def test_torch_distributed_is_joined_without_init(tmp_path: Path) -> None:
    for before, ranks, same in workers.run_fresh(3, joins_by_itself, str(tmp_path / "store")):
        assert before == "shut_down: this process belongs to no job: call poseidon.init() first"
        assert (ranks, same) == (3, True)


def parts(folder: str, with_init: bool) -> tuple[Any, ...]:
    start_torch(folder)
    rank = dist.get_rank()
    if with_init:
        poseidon.init()
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [1, 2], [3])]
    found: list[tuple[int, int, int]] = []
    refused = ""
    for group in groups:
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            refused = text_of(context_of, group)
            continue
        here = context_of(group)
        assert here is context_of(group)
        found.append((*place(here), total(here)))
    whole = context_of()
    found.append((*place(whole), total(whole)))
    jobs = {context_of(group).settings.job for group in groups if group is not dist.GroupMember.NON_GROUP_MEMBER}
    assert len(jobs | {whole.settings.job}) == len(found)
    dist.barrier()
    if rank == 0:
        poseidon.shutdown()
    dist.destroy_process_group()
    poseidon.shutdown()
    return found, refused


@pytest.mark.parametrize("with_init", [False, True])
def test_a_part_of_the_world_is_a_job_of_its_own(tmp_path: Path, with_init: bool) -> None:
    answers = workers.run_fresh(4, parts, str(tmp_path / "store"), with_init)
    assert [found for found, _ in answers] == [
        [(0, 2, 3), (0, 4, 10)],
        [(1, 2, 3), (0, 2, 5), (1, 4, 10)],
        [(0, 2, 7), (1, 2, 5), (2, 4, 10)],
        [(1, 2, 7), (0, 1, 0), (3, 4, 10)],
    ]
    for rank, (_, refused) in enumerate(answers):
        assert refused.startswith(f"invalid_argument: process_group does not have this process, rank {rank}")


def only_a_part(folder: str) -> int:
    """The others do not take part: it is no business of theirs."""
    start_torch(folder)
    group = dist.new_group([0, 2])
    answer = -1 if dist.get_rank() == 1 else total(context_of(group))
    dist.barrier()
    dist.destroy_process_group()
    return answer


def test_a_part_is_joined_by_its_ranks_alone(tmp_path: Path) -> None:
    assert workers.run_fresh(3, only_a_part, str(tmp_path / "store")) == [4, -1, 4]


def changes_its_world(folder: str, with_init: bool) -> tuple[Any, ...]:
    start_torch(folder + "/all")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]  # as with mp.spawn: only torch.distributed says what holds
    rank = dist.get_rank()
    if with_init:
        poseidon.init()
    first = context_of()
    part = context_of(dist.new_group([0, 1])) if rank < 2 else None
    dist.barrier()
    dist.destroy_process_group()
    gone = text_of(context_of)
    start_torch(f"{folder}/{rank % 2}", rank // 2, 2)  # 0 with 2, 1 with 3
    if with_init:
        refused = text_of(context_of)
        poseidon.shutdown()
        return gone, refused
    second = context_of()
    answer = gone, place(first), place(second), total(second), first is second
    left = [text_of(one.control.barrier) for one in (first, part) if one is not None and one.control is not None]
    dist.destroy_process_group()
    return *answer, left


def test_another_world_is_another_job(tmp_path: Path) -> None:
    answers = workers.run_fresh(4, changes_its_world, str(tmp_path), False)
    assert not any(isinstance(answer, workers.Failure) for answer in answers), answers
    for rank, (gone, first, second, ranks, same, left) in enumerate(answers):
        assert gone.startswith("shut_down")
        assert (first, second) == ((rank, 4), (rank // 2, 2))
        assert (ranks, same) == (3, False)
        assert all(text.startswith("shut_down") for text in left), left


def test_another_world_than_that_of_init_is_refused(tmp_path: Path) -> None:
    for rank, (gone, refused) in enumerate(workers.run_fresh(4, changes_its_world, str(tmp_path), True)):
        assert gone == "nothing was raised", "init() was called: the job does not depend on torch.distributed"
        assert refused.startswith(
            f"invalid_argument: torch.distributed is initialized as rank {rank // 2} of 2, while poseidon.init() was "
            f"called as rank {rank} of 4"
        )


def fails_in_a_part(folder: str) -> str:
    start_torch(folder)
    group = dist.new_group([0, 1])
    here = context_of(group)
    dist.barrier(group)  # until both have met; a failure before that is another error
    assert here.control is not None
    if dist.get_rank() == 1:
        raise_in_a_thread(here.control)
        return ""
    return text_of(lambda: meet_twice(here.control))


def meet_twice(control: Control) -> None:
    """The other rank fails after the first barrier, and may be heard of before this one has left it."""
    control.barrier()
    control.barrier()


def raise_in_a_thread(control: Control) -> None:
    import threading

    def fail() -> None:
        control.barrier()  # it is a thread that the others wait for
        raise ValueError("the data of rank one is broken")

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()


def test_a_failure_reaches_the_ranks_of_the_group(tmp_path: Path) -> None:
    # With a third rank that is not in the group and does nothing.
    answers = workers.run_fresh(3, in_group_of_two, str(tmp_path / "store"))
    assert answers[0].startswith("aborted: rank 1")
    assert "the data of rank one is broken" in answers[0]


def in_group_of_two(folder: str) -> str:
    if int(os.environ["RANK"]) == 2:
        start_torch(folder)
        dist.new_group([0, 1])
        return ""
    return fails_in_a_part(folder)


def without_torch() -> str:
    poseidon.init()
    return text_of(context_of, object())


def test_a_group_needs_torch_distributed() -> None:
    assert workers.run_fresh(1, without_torch) == [
        "invalid_argument: process_group was given without torch.distributed: call dist.init_process_group() first"
    ]


def recovers(folder: str) -> str:
    poseidon.init(on_failure="rejoin")
    start_torch(folder)
    return text_of(context_of, dist.new_group([dist.get_rank()], use_local_synchronization=True))


def test_a_part_does_not_go_with_recovery(tmp_path: Path) -> None:
    for answer in workers.run_fresh(2, recovers, str(tmp_path / "store")):
        assert answer.startswith(
            "invalid_argument: on_failure=rejoin and process_group with a part of the ranks exclude"
        )


def optimizers_of_parts(folder: str) -> dict[str, tuple[float, float]]:
    """Two parts of two ranks, each with a learning rate of its own. By kind: a parameter, and what it should be."""
    start_torch(folder)
    rank = dist.get_rank()
    parts = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rate = 0.1 * (1 + rank // 2)
    found = {}
    for kind in ("worker", "server"):
        layer = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(layer.weight)
        model = poseidon.DistributedDataParallel(layer, process_group=parts[rank // 2])
        optimizer = poseidon.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=rate), model, update=kind)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.full((1, 1), 1.0 + rank)).sum().backward()
            optimizer.step()
        optimizer.synchronize()
        mean = 1.5 if rank < 2 else 3.5
        found[kind] = (layer.weight.item(), 1 - 2 * rate * mean)
    dist.barrier()
    return found


def test_an_optimizer_belongs_to_the_job_of_its_model(tmp_path: Path) -> None:
    for found in workers.run_fresh(4, optimizers_of_parts, str(tmp_path / "store")):
        for weight, expected in found.values():
            assert weight == pytest.approx(expected)


def resumes(folder: str, run: int, whole: bool) -> tuple[int, list[str]]:
    """Trains in a group until its servers have saved a step; the version it went on from, and parameters at both ends.

    The two groups share the directory. Their models are not the same.
    """
    start_torch(f"{folder}/store-{run}")
    rank, version = dist.get_rank(), 2 * run
    poseidon.init(checkpoint_dir=f"{folder}/saved", checkpoint_every=2, job="parts")
    groups = [dist.group.WORLD] if whole else [dist.new_group([0, 1]), dist.new_group([2, 3])]
    number = 0 if whole else rank // 2
    torch.manual_seed(number)
    model = poseidon.DistributedDataParallel(torch.nn.Linear(4, 4), process_group=groups[number], scheme="ps")
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = poseidon.DistributedOptimizer(inner, model, update="server", resume=True)
    parameters = [parameters_digest(model)]
    for step in range(optimizer.resumed_version, version):
        optimizer.zero_grad()
        model(torch.full((2, 4), step + rank + 1.0)).square().mean().backward()
        optimizer.step()
    job = model.trained_model().context.settings.job
    there = functools.partial(_core.list_checkpoints, f"{folder}/saved")
    wait_until(
        lambda: any(one.job.startswith(job) and one.version == version and one.complete for one in there()),
        lambda: f"version {version} of {job}, there are {[(one.job, one.version) for one in there()]}",
    )
    poseidon.shutdown()
    return optimizer.resumed_version, [*parameters, parameters_digest(model)]


@pytest.mark.parametrize("whole", [True, False], ids=["all ranks", "two parts"])
def test_each_group_goes_on_from_its_own_checkpoints(tmp_path: Path, whole: bool) -> None:
    first, second = (workers.run_fresh(4, resumes, str(tmp_path), run, whole) for run in (1, 2))
    assert [version for version, _ in first + second] == [0] * 4 + [2] * 4
    assert [before for _, (before, _) in second] == [after for _, (_, after) in first]
    assert len({after for _, (_, after) in second}) == (1 if whole else 2)
