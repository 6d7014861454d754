"""LocalSGD with Recovery: every rank ends with the bits that it has without faults, whenever a worker is killed."""

from __future__ import annotations

import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from recovery_cases import Fault, Supervisor, train

STEPS = 10  # the last averaging is after 9, so the ranks end with different parameters
SIZE = 3
PLAIN = "adamw local dropout"
OUTER = "sgd local outer dropout"


def train_all(folder: Path, kind: str, faults: list[Fault], steps: int = STEPS) -> list[dict[str, Any]]:
    supervisor = Supervisor(folder, SIZE)
    answers = supervisor.run(train, kind, steps, faults, str(folder / "snapshots"))
    assert supervisor.restarted == len(faults)
    return answers


@cache
def undisturbed(kind: str) -> list[str]:
    """Each rank's digest."""
    with tempfile.TemporaryDirectory() as folder:
        answers = train_all(Path(folder), kind, [])
    digests = [answer["digest"] for answer in answers]
    assert len(set(digests)) == SIZE
    assert all(answer["history"] == [] and answer["steps_made"] == STEPS for answer in answers)
    return digests


def recovered(folder: Path, kind: str, *faults: Fault) -> list[dict[str, Any]]:
    answers = train_all(folder, kind, list(faults))
    assert [answer["digest"] for answer in answers] == undisturbed(kind)
    return answers


@pytest.mark.parametrize("kind", [PLAIN, OUTER])
@pytest.mark.parametrize("rank", [0, 2])
def test_one_worker_dies_again_and_again(tmp_path: Path, kind: str, rank: int) -> None:
    """Between averagings and beside them; all go back to the version after an averaging."""
    phases = ["between", "forward", "after step", "end", "backward", "before step", "between", "after step"]
    faults = [Fault(rank, step, phase) for step, phase in enumerate(phases, start=1)]
    answers = recovered(tmp_path, kind, *faults)
    for other, answer in enumerate(answers):
        if other != rank:
            assert [event["replaced"] for event in answer["history"]] == [[rank]] * len(phases)
            assert all(event["step"] in (0, 3, 6) for event in answer["history"])


@pytest.mark.parametrize("kind", [PLAIN, OUTER])
def test_in_the_middle_of_an_averaging(tmp_path: Path, kind: str) -> None:
    recovered(
        tmp_path,
        kind,
        Fault(1, 2, "before step", 0.0005),
        Fault(0, 5, "before step", 0.001),
        Fault(2, 8, "before step", 0.002),
    )


def test_two_at_once_and_before_the_start(tmp_path: Path) -> None:
    recovered(tmp_path, OUTER, Fault(1, 0, "set-up"), Fault(0, 4, "forward"), Fault(1, 4, "backward"))


def test_at_the_end(tmp_path: Path) -> None:
    """Nobody goes back behind a step that `until` has called complete: the replacement makes none."""
    answers = train_all(tmp_path, PLAIN, [Fault(1, STEPS - 1, "end")])
    assert [answer["digest"] for answer in answers] == undisturbed(PLAIN)


def test_all_are_started_again(tmp_path: Path) -> None:
    """From the state after 7 steps, between two averagings."""
    train_all(tmp_path, OUTER, [], steps=7)
    answers = train_all(tmp_path, OUTER, [])
    assert [answer["digest"] for answer in answers] == undisturbed(OUTER)
    assert all(answer["steps_made"] == STEPS - 7 for answer in answers)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_another_number_of_workers_is_refused(tmp_path: Path, size: int) -> None:
    """Whether it can train depends on the number alone; the files of the former ranks are kept."""
    train_all(tmp_path, PLAIN, [], steps=4)
    kept = sorted((tmp_path / "snapshots").glob("*/*"))
    with pytest.raises(AssertionError, match="ended with 1"):
        Supervisor(tmp_path, size, restarts=0).run(train, PLAIN, STEPS, [], str(tmp_path / "snapshots"))
    assert sorted((tmp_path / "snapshots").glob("*/*")) == kept
    assert len(train_all(tmp_path, PLAIN, [])) == SIZE


def test_a_rank_that_has_lost_its_files(tmp_path: Path) -> None:
    train_all(tmp_path, PLAIN, [], steps=4)
    shutil.rmtree(tmp_path / "snapshots" / f"rank-00001-of-{SIZE}")
    with pytest.raises(AssertionError, match="ended with 1"):
        train_all(tmp_path, PLAIN, [])


def test_a_damaged_version_is_that_of_all(tmp_path: Path) -> None:
    """All ranks go back to the one before."""
    train_all(tmp_path, OUTER, [], steps=7)
    newest = max((tmp_path / "snapshots" / f"rank-00002-of-{SIZE}").iterdir())
    newest.write_bytes(newest.read_bytes()[:-1])
    answers = train_all(tmp_path, OUTER, [])
    assert [answer["digest"] for answer in answers] == undisturbed(OUTER)
    assert all(answer["steps_made"] == STEPS - 6 for answer in answers)
