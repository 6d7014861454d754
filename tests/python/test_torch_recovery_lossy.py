"""Workers that are killed while lossy schemes keep on each what it has not sent yet."""

from __future__ import annotations

import contextlib
import io
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import poseidon.torch as poseidon
import workers
from poseidon.errors import InvalidArgument
from poseidon.schemes import SCHEMES
from recovery_cases import Fault, Supervisor, network, train

STEPS = 7
SIZE = 3
LOSSY = [name for name, scheme in SCHEMES.items() if scheme.lossy]
KINDS = [f"{kind} {scheme}" for scheme in LOSSY for kind in ("sgd dropout", "adamw overlap dropout")]


def supervisor(folder: Path, **options: Any) -> Supervisor:
    return Supervisor(folder, SIZE, POSEIDON_TOPK_FRACTION="0.1", **options)


@cache
def undisturbed(kind: str, servers: int = 0) -> str:
    """The digest of a training in which nothing fails."""
    with tempfile.TemporaryDirectory() as folder:
        answers = supervisor(Path(folder), servers=servers).run(train, kind, STEPS, [])
    (same,) = {answer["digest"] for answer in answers}
    return same


def run(folder: Path, kind: str, *faults: Fault, snapshots: bool, servers: int = 0) -> list[dict[str, Any]]:
    """The answers of a training with these faults; snapshots of every second step."""
    watching = supervisor(folder, servers=servers)
    answers = watching.run(train, kind, STEPS, faults, str(folder / "snapshots") if snapshots else None)
    assert watching.restarted == len(faults)
    return answers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [0, 2])
def test_with_snapshots_the_bits_are_those_without_faults(tmp_path: Path, kind: str, rank: int) -> None:
    faults = [Fault(rank, 1, "backward"), Fault(rank, 4, "after step"), Fault(rank, 5, "between")]
    answers = run(tmp_path, kind, *faults, snapshots=True)
    assert {answer["digest"] for answer in answers} == {undisturbed(kind)}
    for other, answer in enumerate(answers):
        if other != rank:  # back to a step of which there is a snapshot
            assert [event["step"] % 2 for event in answer["history"]] == [0, 0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_in_the_middle_of_an_exchange(tmp_path: Path, kind: str) -> None:
    delays = [0.0003, 0.0012, 0.0024]
    faults = [Fault(1, step, "exchange", delay) for step, delay in enumerate(delays, start=2)]
    answers = run(tmp_path, kind, *faults, snapshots=True)
    assert {answer["digest"] for answer in answers} == {undisturbed(kind)}


@pytest.mark.parametrize("kind", KINDS)
def test_all_at_once_go_on_from_a_snapshot(tmp_path: Path, kind: str) -> None:
    answers = run(tmp_path, kind, *(Fault(rank, 5, "between") for rank in range(SIZE)), snapshots=True)
    assert {answer["digest"] for answer in answers} == {undisturbed(kind)}
    assert max(answer["steps_made"] for answer in answers) <= STEPS - 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_lost_server_needs_no_snapshot(tmp_path: Path, kind: str) -> None:
    """All workers are left, and with them what they have not sent."""
    answers = run(tmp_path, kind, Fault(0, 3, "backward", server=0), snapshots=False, servers=1)
    assert {answer["digest"] for answer in answers} == {undisturbed(kind, servers=1)}


def train_and_listen(folder: Path, kind: str, faults: list[Fault]) -> dict[str, Any]:
    """The same with what the process says, without snapshots."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        answer = train(folder, kind, STEPS, faults)
    return {**answer, "said": said.getvalue()}


@pytest.mark.parametrize("scheme", LOSSY)
def test_without_snapshots_the_replicas_stay_equal_and_the_loss_is_told(tmp_path: Path, scheme: str) -> None:
    kind = f"sgd dropout {scheme}"
    answers = supervisor(tmp_path).run(train_and_listen, kind, [Fault(1, 4, "backward")])
    (same,) = {answer["digest"] for answer in answers}
    assert same != undisturbed(kind)
    told = [answer["said"].count("this rank begins step 4 without residuals") for answer in answers]
    assert told == [0, 1, 0]


def with_servers(folder: Path, scheme: str) -> str:
    poseidon.init(checkpoint_dir=str(folder / "checkpoints"), on_failure="rejoin", small_bytes=0)
    module = network("")
    model = poseidon.DistributedDataParallel(module, scheme=scheme)
    inner = torch.optim.SGD(module[0].parameters(), lr=0.05)
    optimizer = poseidon.DistributedOptimizer(inner, model, update="server")
    with pytest.raises(InvalidArgument) as error:
        poseidon.Recovery(model, optimizer)
    return str(error.value)


def test_updates_on_servers_exclude_lossy_layers(tmp_path: Path) -> None:
    for text in workers.run_fresh(2, with_servers, tmp_path, "topk"):
        assert "the lossy scheme or wire format of parameter 1.weight has what was not sent on one rank alone" in text


@pytest.mark.parametrize("kind", [f"sgd dropout {LOSSY[0]}", f"adamw dropout {LOSSY[-1]}"])
def test_a_job_that_was_ended_goes_on_from_its_snapshot(tmp_path: Path, kind: str) -> None:
    """With on_failure=abort, which has no generations: all ranks start again. Rank 0 is compared, because the others'
    buffers are their own after the last forward pass."""
    options = {"POSEIDON_SMALL_BYTES": "256", "POSEIDON_TOPK_FRACTION": "0.1"}
    snapshots = str(tmp_path / "snapshots")
    for steps in (4, STEPS):
        answers = workers.run_fresh(SIZE, train, tmp_path, kind, steps, [], snapshots, **options)
    assert all(isinstance(answer, dict) for answer in answers), answers
    assert answers[0]["digest"] == undisturbed(kind)
    assert [answer["steps_made"] for answer in answers] == [STEPS - 4] * SIZE
