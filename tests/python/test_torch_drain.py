"""A worker that is asked to end with SIGTERM leaves between two steps, and no step is lost."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import poseidon.torch as poseidon
from poseidon.errors import InvalidArgument
from recovery_cases import Fault, Supervisor, train

STEPS = 7


@pytest.mark.parametrize(("kind", "rank"), [("sgd dropout", 0), ("adamw overlap dropout", 1)])
def test_the_others_go_on_with_the_next_step(tmp_path: Path, kind: str, rank: int) -> None:
    """The replacement gets the state, and the end has the bits of a training that nobody left."""
    (tmp_path / "undisturbed").mkdir()
    undisturbed = Supervisor(tmp_path / "undisturbed", 3).run(train, kind, STEPS, [])
    supervisor = Supervisor(tmp_path, 3)
    asked = Fault(rank, 3, "forward", signal=signal.SIGTERM)
    answers = supervisor.run(train, kind, STEPS, [asked])
    assert supervisor.restarted == 1
    assert {answer["digest"] for answer in answers} == {undisturbed[0]["digest"]}
    for other in {0, 1, 2} - {rank}:
        assert [(event["step"], event["replaced"]) for event in answers[other]["history"]] == [(4, [rank])]
    assert answers[rank]["steps_made"] == STEPS - 4


def test_with_fewer_workers_the_others_go_on_without_it(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, 3, restarts=0, POSEIDON_ON_FAILURE="shrink")
    answers = supervisor.run(train, "sgd dropout", STEPS, [Fault(2, 3, "forward", signal=signal.SIGTERM)])
    assert answers[2] is None
    for answer in answers[:2]:
        assert [(event["step"], event["world_size"]) for event in answer["history"]] == [(4, 2)]


def train_with_a_handler(folder: Path) -> dict[str, Any]:
    """The program handles SIGTERM itself."""
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    return {**train(folder, "sgd", STEPS, [Fault(1, 3, "forward", signal=signal.SIGTERM)]), "seen": seen}


def test_a_handler_of_the_program_stays(tmp_path: Path) -> None:
    answers = Supervisor(tmp_path, 2).run(train_with_a_handler)
    assert [answer["seen"] for answer in answers] == [[], [signal.SIGTERM]]
    assert all(answer["history"] == [] and answer["steps_made"] == STEPS for answer in answers)


def test_a_job_that_cannot_go_on_without_a_worker_says_so() -> None:
    poseidon.init()
    model = poseidon.DistributedDataParallel(nn.Linear(4, 2))
    recovery = poseidon.Recovery(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(InvalidArgument, match="on_failure=rejoin or shrink"):
        recovery.drain()
    poseidon.shutdown()
