"""Workers that are killed and replaced: the parameters in the end have the bits of a training without faults."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from recovery_cases import Fault, Supervisor, train

STEPS = 7
SIZE = 3
PLAIN = "sgd dropout"
OVERLAP = "adamw overlap dropout"


@cache
def undisturbed(kind: str, size: int = SIZE) -> str:
    """The digest of a training in which nothing fails."""
    with tempfile.TemporaryDirectory() as folder:
        answers = Supervisor(Path(folder), size).run(train, kind, STEPS, [])
    assert all(answer["history"] == [] and answer["steps_made"] == STEPS for answer in answers)
    (same,) = {answer["digest"] for answer in answers}
    return same


def recovered(
    folder: Path, kind: str, *faults: Fault, size: int = SIZE, snapshots: bool = False
) -> list[dict[str, Any]]:
    """The answers of all ranks of a training with these faults, which must not show in the bits."""
    supervisor = Supervisor(folder, size)
    answers = supervisor.run(train, kind, STEPS, faults, str(folder / "snapshots") if snapshots else None)
    assert supervisor.restarted == len(faults)
    assert {answer["digest"] for answer in answers} == {undisturbed(kind.removesuffix(" barrier"), size)}
    return answers


@pytest.mark.parametrize("kind", [PLAIN, OVERLAP])
@pytest.mark.parametrize("rank", [0, 2])
def test_one_worker_dies_again_and_again(tmp_path: Path, kind: str, rank: int) -> None:
    """In every step at another place."""
    phases = ["between", "forward", "backward", "before step", "after step", "end"]
    faults = [Fault(rank, step, phase) for step, phase in enumerate(phases, start=1)]
    answers = recovered(tmp_path, kind, *faults)
    for other, answer in enumerate(answers):
        if other != rank:
            events = answer["history"]
            assert [event["replaced"] for event in events] == [[rank]] * len(phases)
            assert [event["generation"] for event in events] == [2, 3, 4, 5, 6, 7]
            assert all(event["seconds"] < 10 and f"rank {rank}" in event["cause"] for event in events)
            assert all(step - 1 <= event["step"] <= step + 1 for step, event in enumerate(events, start=1))


@pytest.mark.parametrize("kind", [PLAIN, OVERLAP])
def test_in_the_middle_of_an_exchange(tmp_path: Path, kind: str) -> None:
    delays = [0.0003, 0.0006, 0.0012, 0.0024]
    recovered(tmp_path, kind, *(Fault(1, step, "exchange", delay) for step, delay in enumerate(delays, start=1)))


@pytest.mark.parametrize(
    "kind", ["adagrad sparse", "adagrad overlap sparse", "momentum sparse", "momentum overlap sparse"]
)
def test_sparse_gradients(tmp_path: Path, kind: str) -> None:
    recovered(tmp_path, kind, Fault(1, 2, "backward"), Fault(0, 4, "exchange", 0.0005), Fault(2, 5, "after step"))


@pytest.mark.parametrize("kind", [PLAIN, OVERLAP])
def test_everybody_has_made_half_a_step(tmp_path: Path, kind: str) -> None:
    """Who waits in the barrier has updated already, and must undo it: nobody has the next step."""
    answers = recovered(tmp_path, f"{kind} barrier", Fault(1, 4, "after step"))
    assert [event["step"] for event in answers[0]["history"]] == [4]


def test_a_step_that_was_complete_is_made_again(tmp_path: Path) -> None:
    """The others wait in the next forward pass for what one has not sent; other layers they have updated already."""
    answers = recovered(tmp_path, "sgd overlap bufferless", Fault(1, 4, "backward", 0.5, stalls=True))
    for answer in (answers[0], answers[2]):
        assert [event["step"] for event in answer["history"]] == [4]
        assert answer["steps_made"] == STEPS + 2


def test_before_the_first_meeting(tmp_path: Path) -> None:
    answers = recovered(tmp_path, PLAIN, Fault(1, 0, "start"), Fault(0, 0, "set-up"))
    assert answers[2]["history"] == []  # nobody had to wait for more than late workers


def test_in_the_first_transfers(tmp_path: Path) -> None:
    recovered(tmp_path, PLAIN, Fault(0, 1, "transfer 1"), Fault(1, 2, "transfer 2"), Fault(0, 3, "transfer 2"))


@pytest.mark.parametrize("second", [0, 1, 2])
def test_again_while_the_state_is_sent(tmp_path: Path, second: int) -> None:
    """Rank 1 is replaced; its replacement, or who sends to it or looks on, is killed in the middle of that, twice."""
    faults = [Fault(1, 3, "backward"), Fault(second, 2, "transfer 1"), Fault(second, 3, "transfer 2")]
    answers = recovered(tmp_path, OVERLAP, *faults)
    assert all(event["generation"] == 4 for answer in answers for event in answer["history"])


@pytest.mark.parametrize(("kind", "ranks"), [(PLAIN, (0, 1)), (OVERLAP, (1, 2))])
def test_two_at_once(tmp_path: Path, kind: str, ranks: tuple[int, int]) -> None:
    answers = recovered(tmp_path, kind, *(Fault(rank, 4, "backward") for rank in ranks))
    (other,) = {0, 1, 2} - set(ranks)
    assert answers[other]["history"][-1]["step"] in (3, 4)


def test_all_at_once_start_from_the_beginning(tmp_path: Path) -> None:
    answers = recovered(tmp_path, PLAIN, *(Fault(rank, 4, "end") for rank in range(SIZE)))
    assert {answer["steps_made"] for answer in answers} == {STEPS}


def test_when_all_steps_are_done(tmp_path: Path) -> None:
    """Whoever is done waits for the others: the last step is made by all, though one has to be replaced for it."""
    recovered(tmp_path, OVERLAP, Fault(1, STEPS - 1, "end"))
