"""Servers that are killed while a job runs, alone and with workers: the bits in the end are those without faults."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from recovery_cases import Fault, Supervisor, train

STEPS = 9
SIZE = 2
PLAIN = "sgd dropout"
SGD = "sgd server dropout"
ADAM = "adamw server"


@cache
def undisturbed(kind: str, servers: int) -> str:
    """The digest of a training in which nothing fails. The schemes of `PLAIN` depend on the number of servers."""
    with tempfile.TemporaryDirectory() as folder:
        answers = Supervisor(Path(folder), SIZE, servers=servers).run(train, kind, STEPS, [])
    assert all(answer["history"] == [] and answer["steps_made"] == STEPS for answer in answers)
    (same,) = {answer["digest"] for answer in answers}
    return same


def recovered(folder: Path, kind: str, *faults: Fault, servers: int = 0, **options: Any) -> list[dict[str, Any]]:
    """The answers of all ranks of a training with these faults, which must not show in the bits."""
    supervisor = Supervisor(folder, SIZE, servers=servers, **options)
    answers = supervisor.run(train, kind, STEPS, faults)
    assert {answer["digest"] for answer in answers} == {undisturbed(kind, servers if kind == PLAIN else 0)}
    assert supervisor.restarted == len(faults)
    return answers


def of_server(number: int, step: int, phase: str, delay: float = 0.0) -> Fault:
    return Fault(0, step, phase, delay, server=number)


@pytest.mark.parametrize("on_failure", ["rejoin", "shrink"])
def test_updates_on_workers_go_on_when_a_server_is_started_again(tmp_path: Path, on_failure: str) -> None:
    """Another server stays, and takes the job's next generation."""
    delays = [0.0003, 0.0006, 0.0012, 0.0024]
    faults = [of_server(step % 2, step, "exchange", delay) for step, delay in enumerate(delays, start=1)]
    faults.append(of_server(1, 6, "after step"))
    answers = recovered(tmp_path, PLAIN, *faults, servers=2, POSEIDON_ON_FAILURE=on_failure)
    for answer in answers:
        assert answer["history"]
        assert all(event["replaced"] == [] and "server" in event["cause"] for event in answer["history"])
        assert answer["steps_made"] <= STEPS + len(faults)


def test_a_server_that_takes_its_time_is_waited_for(tmp_path: Path) -> None:
    answers = recovered(tmp_path, PLAIN, of_server(0, 3, "backward"), servers=1, server_delay=2.0)
    assert all(event["seconds"] > 1.9 for answer in answers for event in answer["history"])


def test_a_server_and_a_worker_at_once(tmp_path: Path) -> None:
    recovered(tmp_path, PLAIN, of_server(0, 3, "backward"), Fault(1, 3, "backward"), servers=1)


@pytest.mark.parametrize("kind", [SGD, ADAM])
def test_workers_with_their_servers(tmp_path: Path, kind: str) -> None:
    """Before the first version, between two, twice in short order, at every place of a step."""
    faults = [
        Fault(1, 1, "backward"),
        Fault(0, 2, "end"),
        Fault(1, 3, "exchange", 0.001),
        Fault(0, 4, "between"),
        Fault(1, 5, "before step"),
        Fault(1, 6, "after step"),
    ]
    answers = recovered(tmp_path, kind, *faults)
    assert all(event["step"] % 2 == 0 for answer in answers for event in answer["history"])


def test_dedicated_servers_that_hold_parameters(tmp_path: Path) -> None:
    """Servers, workers, and both at once; a server that stays goes back with the others."""
    faults = [
        of_server(1, 1, "exchange", 0.0005),
        Fault(1, 3, "after step"),
        of_server(0, 5, "backward"),
        Fault(1, 5, "backward"),
        of_server(0, 7, "end"),
        of_server(1, 7, "end"),
    ]
    recovered(tmp_path, SGD, *faults, servers=2)


def test_a_server_is_killed_while_it_writes(tmp_path: Path) -> None:
    recovered(tmp_path, ADAM, Fault(0, 3, "forward", server=0, writing=True), servers=1)


def test_a_worker_is_killed_while_its_server_writes(tmp_path: Path) -> None:
    recovered(tmp_path, ADAM, Fault(1, 3, "forward", writing=True))


def test_again_while_all_go_back(tmp_path: Path) -> None:
    recovered(tmp_path, SGD, Fault(1, 5, "backward"), Fault(0, 2, "transfer 1"), Fault(1, 3, "transfer 2"))


def test_all_at_once_go_on_from_the_disk(tmp_path: Path) -> None:
    answers = recovered(tmp_path, SGD, *(Fault(rank, 5, "between") for rank in range(SIZE)))
    assert all(0 < answer["steps_made"] < STEPS for answer in answers)
