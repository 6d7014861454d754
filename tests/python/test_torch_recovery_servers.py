"""Servers that are killed while a job runs, alone and with workers: the bits in the end are those without faults."""

from __future__ import annotations

import contextlib
import io
import tempfile
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import poseidon.torch as poseidon
from poseidon.adapter.versions import worth_keeping
from poseidon.errors import Aborted, Refused
from poseidon.restore import restore
from recovery_cases import Fault, Faults, Supervisor, make_optimizer, network, parameters_and_state, train
from test_torch_recovery_misuse import error_of, loss_of
from waiting import SLOWED, wait_until

STEPS = 9
SIZE = 2
PLAIN = "sgd dropout"
SGD = "sgd server dropout"
ADAM = "adamw server"


def supervisor(folder: Path, size: int = SIZE, **options: Any) -> Supervisor:
    """One of a job whose servers save every second step."""
    saving = {"POSEIDON_CHECKPOINT_DIR": str(folder / "checkpoints"), "POSEIDON_CHECKPOINT_EVERY": "2"}
    return Supervisor(folder, size, **saving, **options)


@cache
def undisturbed(kind: str, servers: int) -> str:
    """The digest of a training in which nothing fails. The schemes of `PLAIN` depend on the number of servers."""
    with tempfile.TemporaryDirectory() as folder:
        answers = supervisor(Path(folder), servers=servers).run(train, kind, STEPS, [])
    assert all(answer["history"] == [] and answer["steps_made"] == STEPS for answer in answers)
    (same,) = {answer["digest"] for answer in answers}
    return same


def recovered(folder: Path, kind: str, *faults: Fault, servers: int = 0, **options: Any) -> list[dict[str, Any]]:
    """The answers of all ranks of a training with these faults, which must not show in the bits."""
    watching = supervisor(folder, servers=servers, **options)
    answers = watching.run(train, kind, STEPS, faults)
    alike = kind.removesuffix(" barrier")
    assert {answer["digest"] for answer in answers} == {undisturbed(alike, servers if kind == PLAIN else 0)}
    assert watching.restarted == len(faults)
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
    answers = recovered(tmp_path, PLAIN, of_server(0, 3, "backward"), servers=1, server_delay=1.0)
    assert all(event["seconds"] > 0.9 for answer in answers for event in answer["history"])


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


def test_a_version_that_no_worker_has_the_other_part_of(tmp_path: Path) -> None:
    """The servers have saved step 2, and nobody has ended it: there is only the start to go back to."""
    answers = recovered(tmp_path, f"{SGD} barrier", Fault(0, 1, "after step", 0.3, stalls=True))
    assert [event["step"] for event in answers[1]["history"]] == [0]


def test_again_while_all_go_back(tmp_path: Path) -> None:
    recovered(tmp_path, SGD, Fault(1, 5, "backward"), Fault(0, 2, "transfer 1"), Fault(1, 3, "transfer 2"))


def test_all_at_once_go_on_from_the_disk(tmp_path: Path) -> None:
    answers = recovered(tmp_path, SGD, *(Fault(rank, 5, "between") for rank in range(SIZE)))
    assert all(0 < answer["steps_made"] < STEPS for answer in answers)


def test_with_fewer_workers_and_servers(tmp_path: Path) -> None:
    """With shrink, from the same version."""
    watching = supervisor(tmp_path, 3, restarts=0, POSEIDON_ON_FAILURE="shrink")
    answers = watching.run(train, SGD, STEPS, [Fault(2, 5, "backward")])
    assert answers[2] is None
    assert answers[0]["digest"] == answers[1]["digest"]
    for answer in answers[:2]:
        (event,) = answer["history"]
        assert event["step"] in (2, 4)
        assert answer["world_sizes"] == [3] * 6 + [2] * (STEPS - event["step"])


def fails_again(folder: Path, kind: str, steps: list[int]) -> tuple[int, str]:
    """Rank 1 fails at each of these steps in turn; how often training went on, and what ended it."""
    poseidon.init()
    model = poseidon.DistributedDataParallel(network(""))
    optimizer = make_optimizer(kind, model)
    recovery = poseidon.Recovery(model, optimizer)
    left = steps if poseidon.rank() == 1 else []

    def attempts() -> None:
        while recovery.until(STEPS):
            with recovery.attempt():
                if left and recovery.step == left[0]:
                    del left[0]
                    raise Aborted("again")
                loss_of(model, recovery.step).backward()
                optimizer.step()

    text = error_of(attempts)
    return len(recovery.history), text


@pytest.mark.parametrize("kind", [SGD, "sgd overlap"])
def test_who_gets_no_further_gives_up_with_all_others(tmp_path: Path, kind: str) -> None:
    """Though the steps before, to which all go back, are completed every time."""
    for survived, text in supervisor(tmp_path).run(fails_again, kind, [3] * 12):
        assert survived == 10
        assert text != "nothing was raised"


@pytest.mark.parametrize("kind", [SGD, "sgd overlap"])
def test_failures_at_other_times_do_not_add_up(tmp_path: Path, kind: str) -> None:
    answers = supervisor(tmp_path).run(fails_again, kind, [3] * 6 + [5] * 6)
    assert answers == [[12, "nothing was raised"]] * SIZE


def told(folder: Path, steps: int) -> tuple[int, str]:
    """The steps that a training made, and what it said on standard error."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        answer = train(folder, SGD, steps, [])
    if steps > 2:
        wait_until(lambda: any(folder.glob("checkpoints/*.ckpt")), "a checkpoint")
    return answer["steps_made"], said.getvalue()


def test_why_training_goes_back_to_its_start_is_told(tmp_path: Path) -> None:
    """All versions are damaged."""
    watching = supervisor(tmp_path, servers=1)
    assert watching.run(told, 5) == [[5, ""]] * SIZE
    for path in tmp_path.glob("checkpoints/*.ckpt"):
        content = bytearray(path.read_bytes())
        content[-100] ^= 1
        path.write_bytes(content)
    (made, said), (others_made, _) = watching.run(told, 5)
    assert made == others_made == 5
    assert said.count("no checkpoint of the job can be used") == 1
    assert "checksum" in said
    assert "goes back to its start" in said


def refused_again_and_again(folder: Path) -> str:
    """What rank 0 says when its servers refuse to restore twice."""
    failures = [Refused(f"that is another model; flight record: /{n}") for n in range(2)]

    def refuse(*args: Any) -> int:
        if failures:
            raise failures.pop()
        return restore(*args)  # only rank 0 is here

    with mock.patch("poseidon.adapter.versions.restore", refuse):
        return told(folder, 1)[1]


def test_a_cause_is_told_once(tmp_path: Path) -> None:
    said = supervisor(tmp_path).run(refused_again_and_again)[0]
    assert said.count("that is another model") == 1


def train_side_by_side(folder: Path, faults: list[Fault]) -> str:
    """Servers update some parameters, workers others as their gradients arrive; a digest."""
    dies = Faults(folder, faults)
    poseidon.init()
    model = poseidon.DistributedDataParallel(network("dropout"))
    params = list(model.parameters())
    optimizers = [
        poseidon.DistributedOptimizer(torch.optim.AdamW(params[:3], lr=0.01), model, update="server"),
        poseidon.DistributedOptimizer(torch.optim.SGD(params[3:], lr=0.05, momentum=0.9), model),
    ]
    recovery = poseidon.Recovery(model, *optimizers, seed=7)
    while recovery.until(STEPS):
        with recovery.attempt():
            loss = loss_of(model, recovery.step)
            dies.reached("exchange", recovery.step)
            loss.backward()
            dies.reached("before step", recovery.step)
            for optimizer in optimizers:
                optimizer.step()
            dies.reached("end", recovery.step)
    digests = [parameters_and_state(model.module, optimizer) for optimizer in optimizers]
    poseidon.barrier()
    return " ".join(digests)


def test_updates_on_servers_and_workers_side_by_side(tmp_path: Path) -> None:
    def run(name: str, *faults: Fault) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (same,) = set(supervisor(folder).run(train_side_by_side, faults))
        return same

    faults = [Fault(1, 1, "end"), Fault(0, 3, "exchange", 0.001), Fault(1, 5, "before step"), Fault(0, 6, "end")]
    assert run("disturbed", *faults) == run("undisturbed")


def without_seed(folder: Path) -> list[list[float]]:
    """What each attempt at a step draws; those at steps 1 and 5 fail once."""
    poseidon.init()
    torch.manual_seed(poseidon.rank())
    model = poseidon.DistributedDataParallel(network(""))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = poseidon.DistributedOptimizer(inner, model, update="server")
    recovery = poseidon.Recovery(model, optimizer)
    drawn: dict[int, list[float]] = {}
    left = [1, 5]
    while recovery.until(6):
        with recovery.attempt():
            drawn.setdefault(recovery.step, []).append(torch.rand(()).item())
            if recovery.step in left:
                left.remove(recovery.step)
                raise Aborted("on all ranks")
            loss_of(model).backward()
            optimizer.step()
    poseidon.barrier()
    return [drawn[step] for step in range(6)]


def test_without_a_seed_random_numbers_are_drawn_again(tmp_path: Path) -> None:
    for drawn in supervisor(tmp_path).run(without_seed):
        assert len(drawn[0]) > 1
        assert len(drawn[5]) > 1
        assert all(len(set(numbers)) == 1 for numbers in drawn)
        assert len({numbers[0] for numbers in drawn}) == 6


def misuses(folder: Path) -> list[str]:
    poseidon.init()
    model = poseidon.DistributedDataParallel(network(""))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    texts = [error_of(lambda: poseidon.DistributedOptimizer(inner, model, update="server", resume=True))]
    optimizer = poseidon.DistributedOptimizer(inner, model, update="server")
    texts.append(error_of(lambda: poseidon.Recovery(model)))
    texts.append(error_of(lambda: poseidon.Recovery(model, optimizer, directory=folder / "snapshots")))
    return texts


def two_backwards(folder: Path) -> str:
    poseidon.init()
    model = poseidon.DistributedDataParallel(network(""))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = poseidon.DistributedOptimizer(inner, model, update="server")
    recovery = poseidon.Recovery(model, optimizer)

    def attempt() -> None:
        with recovery.attempt():
            for _ in range(2):
                loss_of(model).backward()
                optimizer.step()

    return error_of(attempt)


def test_misuse_is_refused(tmp_path: Path) -> None:
    words = ["leave resume out", "not given the DistributedOptimizer", "leave directory out"]
    for texts in supervisor(tmp_path).run(misuses):
        for text, word in zip(texts, words, strict=True):
            assert text.startswith("InvalidArgument")
            assert word in text


def test_an_attempt_is_one_step_for_the_servers(tmp_path: Path) -> None:
    texts = supervisor(tmp_path, POSEIDON_TIMEOUT=str(2 * SLOWED)).run(two_backwards)
    assert any("made 2 synchronizing backward passes" in text for text in texts), "the other one may have been told"


def kept_too_little(folder: Path) -> str:
    poseidon.init()
    model = poseidon.DistributedDataParallel(network(""))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return error_of(lambda: poseidon.DistributedOptimizer(inner, model, update="server"))


def test_one_version_is_too_few(tmp_path: Path) -> None:
    texts = supervisor(tmp_path, POSEIDON_CHECKPOINT_KEEP="1").run(kept_too_little)
    assert all("keep 2 or more" in text for text in texts)


@pytest.mark.parametrize("every", [1, 5])
def test_workers_keep_what_slow_servers_may_have_saved_last(every: int) -> None:
    held: set[int] = set()  # and the start
    for version in range(0, 400 * every, every):
        held = worth_keeping({*held, version}, every)
        assert set(range(max(0, version - 3 * every), version + 1, every)) <= held
        assert len(held) <= 1 + 16
    for interval in (every << doubling for doubling in range(7)):
        assert {version - version % interval - number * interval for number in range(3)} <= held
