"""Joining a job, leaving it and joining again, whichever store the ranks meet in and whatever failed before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import poseidon.torch as poseidon
import workers
from poseidon.errors import PoseidonError
from poseidon.launch import free_port
from waiting import compute_for, wait_for


@pytest.fixture
def agent() -> Iterator[dict[str, str]]:
    """The variables of a store that outlives what the workers do, as torchrun's agent serves one."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    del store


NOBODY = -1


def rank_of_process() -> int:
    return int(os.environ["RANK"])


def exchange() -> int:
    """The sum of all ranks' 1."""
    vector = torch.full((4,), float(poseidon.rank()))
    poseidon.broadcast(vector, root=poseidon.world_size() - 1)
    return int(vector[0]) + 1


def begin(folder: Path, job: int, late: int, **options: Any) -> None:
    """Joins a job for which rank `late` comes when the other one waits already."""
    if rank_of_process() == late:
        wait_for(folder / str(job))
        compute_for(0.3)
    else:
        (folder / str(job)).touch()
    poseidon.init(**options)


def joins_again(folder: Path, late: int) -> list[int]:
    sums = []
    for job in range(3):
        begin(folder, job, late if job > 0 else NOBODY)
        sums.append(exchange())
        poseidon.shutdown()
    return sums


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_may_be_late_when_the_others_join_again(agent: dict[str, str], tmp_path: Path, late: int) -> None:
    assert workers.run_fresh(2, joins_again, tmp_path, late, **agent) == [[2, 2, 2]] * 2


def recovers_twice(folder: Path) -> list[int]:
    steps = []
    for job in range(3):
        begin(folder, job, job % 2, on_failure="rejoin")
        model = poseidon.DistributedDataParallel(torch.nn.Linear(3, 2))
        recovery = poseidon.Recovery(model)
        while recovery.until(2):
            with recovery.attempt():
                model(torch.ones(2, 3)).sum().backward()
        steps.append(recovery.step)
        assert [event.kind for event in recovery.history] == []
        poseidon.shutdown()
    return steps


def test_a_job_with_recovery_may_begin_again_in_the_same_store(agent: dict[str, str], tmp_path: Path) -> None:
    assert workers.run_fresh(2, recovers_twice, tmp_path, **agent) == [[2, 2, 2]] * 2


def fails_and_tries_again(folder: Path) -> list[str]:
    outcomes = []
    for timeout in (1.0, 30.0, 30.0):
        if rank_of_process() == 1 and not outcomes:
            wait_for(folder / "rank 0 has failed")
        if rank_of_process() == 0 and outcomes:  # a rank that comes after it has begun again joins it, and isn't told
            wait_for(folder / "rank 1 has failed")
        try:
            poseidon.init(timeout=timeout)
        except PoseidonError as error:
            outcomes.append(f"{error.code}: {error}")
            (folder / f"rank {rank_of_process()} has failed").touch()
        else:
            outcomes.append(f"sum {exchange()}")
            poseidon.shutdown()
    return outcomes


def test_a_failed_init_does_not_spoil_the_next(agent: dict[str, str], tmp_path: Path) -> None:
    first, second = workers.run_fresh(2, fails_and_tries_again, tmp_path, **agent)
    assert first[0].startswith("timeout: rank 0 waited 1000 ms for rank 1 of 2")
    assert second[0].startswith("aborted: rank 0: rank 0 waited 1000 ms for rank 1 of 2"), "who comes then is told"
    assert first[1:] == second[1:] == ["sum 2", "sum 2"]


def tries_until_all_are_there(folder: Path) -> tuple[int, int]:
    rank, failures = rank_of_process(), 0
    if rank == 2:
        wait_for(folder / "rank 1 has tried 2 times")
    while True:
        try:
            poseidon.init(timeout=(5.0, 0.3, 30.0)[rank])
            return failures, exchange()
        except PoseidonError:
            poseidon.shutdown()
            failures += 1
            (folder / f"rank {rank} has tried {failures} times").touch()


@pytest.mark.parametrize("served_by", ["agent", "rank 0"])
def test_ranks_that_try_again_at_different_times_meet(agent: dict[str, str], tmp_path: Path, served_by: str) -> None:
    answers = workers.run_fresh(3, tries_until_all_are_there, tmp_path, **(agent if served_by == "agent" else {}))
    assert [total for _, total in answers] == [3, 3, 3]
    assert answers[1][0] > 1, "this rank has tried several times"


def with_torchs_group(order: str, urls: list[str]) -> list[int]:
    """Both libraries in one process, one after the other, as often as there are URLs; env:// with a port of its own."""
    rank, sums = rank_of_process(), []
    place = {}
    if not urls[0].startswith("env://"):  # as after mp.spawn
        place = {"rank": rank, "world_size": 2}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
    for job, url in enumerate(urls):
        if rank == job:
            compute_for(0.7)
        if url.startswith("env://:"):
            os.environ["MASTER_PORT"], url = url.removeprefix("env://:"), "env://"
        if order == "poseidon first":
            poseidon.init()
        dist.init_process_group("gloo", init_method=url, **place)
        if order == "torch first":
            poseidon.init()
        assert (poseidon.rank(), poseidon.world_size()) == (rank, 2)
        total = torch.ones(1)
        dist.all_reduce(total)
        sums.append(exchange() + 10 * int(total))
        dist.barrier()
        if rank == job:
            poseidon.shutdown()
        dist.destroy_process_group()
        poseidon.shutdown()
    return sums


@pytest.mark.parametrize("order", ["torch first", "poseidon first"])
@pytest.mark.parametrize("served_by", ["agent", "rank 0"])
def test_beside_torch_distributed_in_any_order(agent: dict[str, str], served_by: str, order: str) -> None:
    # An agent's store keeps where torch's former groups have listened, so that torch itself cannot begin again there;
    # nor can it on a port on which a rank still finds the server that another one is about to end.
    urls = ["env://"] if served_by == "agent" else [f"env://:{free_port()}" for _ in range(3)]
    variables = agent if served_by == "agent" else {}
    assert workers.run_fresh(2, with_torchs_group, order, urls, **variables) == [[22] * len(urls)] * 2


def test_torch_distributed_says_where_a_process_belongs(tmp_path: Path) -> None:
    urls = [f"tcp://127.0.0.1:{free_port()}", f"file://{tmp_path}/a", f"file://{tmp_path}/b"]
    assert workers.run_fresh(2, with_torchs_group, "torch first", urls) == [[22] * 3] * 2


def contradicted(name: str) -> str:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        poseidon.init(**({"rank": 3} if name == "rank" else {}))
    except PoseidonError as error:
        return f"{error.code}: {error}"
    finally:
        dist.destroy_process_group()
    return "nothing was raised"


@pytest.mark.parametrize(("name", "value"), [("RANK", 1), ("WORLD_SIZE", 2), ("rank", 3)])
def test_variables_that_contradict_torch_distributed_are_refused(name: str, value: int) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "", "LOCAL_WORLD_SIZE": "", name: str(value)}
    [answer] = workers.run_fresh(1, contradicted, name, **variables)
    assert answer == (
        f"invalid_argument: {name} is {value} while torch.distributed is initialized as rank 0 of 1: give both the "
        f"same, or leave {name} out"
    )


def recovers_beside_torch() -> str:
    dist.init_process_group("gloo")
    try:
        poseidon.init(on_failure="rejoin")
    except PoseidonError as error:
        return f"{error.code}: {error}"
    finally:
        dist.barrier()  # Gloo fails where one rank ends its part while another still connects
        dist.destroy_process_group()
    return "nothing was raised"


def test_recovery_beside_torch_distributed_is_refused() -> None:
    for answer in workers.run_fresh(2, recovers_beside_torch):
        assert answer.startswith("invalid_argument: on_failure=rejoin and dist.init_process_group() exclude each other")
