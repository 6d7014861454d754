"""`poseidon run --on-failure rejoin|shrink`: workers that fail are started again."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from poseidon.errors import InvalidArgument
from poseidon.launch import Failure, Outcome, run_workers
from waiting import IN_PROGRAMS, wait_until

POSEIDON = [sys.executable, "-m", "poseidon"]

# Worker 1 leaves a file each time that it starts, so that it knows how often that was.
PRELUDE = f"""{IN_PROGRAMS}
import os, pathlib, signal
from poseidon.failure_marks import note_membership
note_membership()
rank, folder = int(os.environ["RANK"]), pathlib.Path(sys.argv[1])
starts = len(list(folder.glob(f"start-{{rank}}-*"))) + 1
(folder / f"start-{{rank}}-{{starts}}").write_text(str(os.getpid()))
def wait_for_end(start):  # as the launcher sees it
    pid = wait_until(lambda: (folder / start).exists() and (folder / start).read_text(), start)
    wait_until(lambda: not pathlib.Path("/proc", pid).exists(), "the end of " + start)
"""

# Each generation adds ones over its workers, until all are there; one's first process is killed before it takes part.
TRAINING = """
import numpy as np
from poseidon import _core
from poseidon.errors import PoseidonError
from poseidon.exchange import Exchange
from poseidon.options import resolve

options = resolve().core()
store = _core.open_store(options)
while True:
    client = _core.Client.connect(options, store)
    options.generation = client.generation
    try:
        exchange = Exchange(client)
        ones = np.ones(1000, dtype=np.float32)
        exchange.declare({"ones": ones})
        if rank == VICTIM and starts == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        exchange.push_pull("ones", ones, average=False)
        if ones[0] < 3:
            wait_until(lambda: _core.generation_wanted(store, options.job) > client.generation, "who joins")
            client.abort("a worker joins")
        exchange.close()
    except PoseidonError:
        client.shutdown()
        continue
    (folder / f"end-{rank}").write_text(f"{client.generation} {client.joining} {ones[0]}")
    break
"""


# Its error comes before any rank is a member of the job.
WITHOUT_RECOVERY = """
import torch
import poseidon.torch as poseidon
poseidon.init()
poseidon.DistributedDataParallel(torch.nn.Linear(4, 2))(torch.ones(2, 4))
"""
UNREACHED = """
from poseidon.errors import PoseidonTimeout
from poseidon.failure_marks import leave_mark
if starts == 1:
    leave_mark(PoseidonTimeout("rank 0 did not come"))
    sys.exit(1)
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Outcome]:
    """Runs the worker's text, after the prelude, with options by name."""

    def start(text: str, count: int, max_restarts: int | None = None, **options: object) -> Outcome:
        path = tmp_path / "worker.py"
        path.write_text(PRELUDE + text)
        command = [sys.executable, str(path), str(tmp_path)]
        return run_workers(command, count, options=options, max_restarts=max_restarts)

    return start


def starts(folder: Path, rank: int) -> int:
    return len(list(folder.glob(f"start-{rank}-*")))


def test_a_worker_that_fails_is_started_again(
    run: Callable[..., Outcome], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    outcome = run(
        "if rank == 1:\n"
        "    if starts == 1: os.kill(os.getpid(), 9)\n"
        "    if starts == 2: sys.exit(3)\n"
        "    print('here', os.environ['WORLD_SIZE'], os.environ['POSEIDON_ON_FAILURE'])\n"
        "    (folder / 'done').touch()\n"
        "wait_for(folder / 'done')",
        2,
        on_failure="rejoin",
    )
    assert outcome == Outcome(codes=[0, 0], restart_counts=[0, 2])
    assert outcome.exit_status == 0
    assert (starts(tmp_path, 0), starts(tmp_path, 1)) == (1, 3)
    printed = capfd.readouterr()
    assert printed.out == "[1] here 2 rejoin\n"
    assert printed.err.splitlines() == [
        "poseidon: rank 1 failed, killed by SIGKILL; it is started again (restart 1 of 3)",
        "poseidon: rank 1 failed, with exit code 3; it is started again (restart 2 of 3)",
    ]


def test_of_a_replica_all_are_started_again(
    run: Callable[..., Outcome], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    outcome = run(
        "if starts == 1:\n"
        "    if rank == 1: os.kill(os.getpid(), 9)\n"
        "    signal.pause()\n"
        "(folder / f'done-{rank}').touch()\n"
        "wait_for(folder / 'done-0')\n"
        "wait_for(folder / 'done-1')",
        2,
        on_failure="shrink",
        replica="0/3@127.0.0.1:29400",
    )
    assert outcome == Outcome(codes=[0, 0], restart_counts=[0, 1])
    assert (starts(tmp_path, 0), starts(tmp_path, 1)) == (2, 2)
    assert capfd.readouterr().err.splitlines() == [
        "poseidon: rank 1 failed, killed by SIGKILL; all ranks of its replica are started again (restart 1 of 3)"
    ]


def test_after_the_last_restart_rejoin_ends_the_run(
    run: Callable[..., Outcome], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    outcome = run(
        "if rank == 1: sys.exit(4)\nwait_for_end('start-1-2')\nsys.exit(5)",
        2,
        max_restarts=1,
        on_failure="rejoin",
    )
    assert outcome.first_failure == Failure(1, 4)
    assert outcome.exit_status == 4
    assert outcome.restart_counts == [0, 1]
    assert starts(tmp_path, 0) == 1, "rank 0 ended because the run did"
    assert "poseidon: rank 1 failed first, with exit code 4" in capfd.readouterr().err


def test_after_the_last_restart_shrink_goes_on_without_the_worker(
    run: Callable[..., Outcome], capfd: pytest.CaptureFixture[str]
) -> None:
    outcome = run(
        "if rank == 1: os.kill(os.getpid(), 15)\nwait_for_end('start-1-2')",
        3,
        max_restarts=1,
        on_failure="shrink",
    )
    assert outcome.codes == [0, -signal.SIGTERM, 0]
    assert outcome.exit_status == 0
    assert "rank 1 failed, killed by SIGTERM; it is not started again, the others go on" in capfd.readouterr().err


def test_a_run_of_which_nobody_is_left_has_failed(run: Callable[..., Outcome]) -> None:
    outcome = run("sys.exit(6 + rank)", 2, max_restarts=0, on_failure="shrink")
    assert outcome.exit_status in (6, 7)
    assert sorted(outcome.codes) == [6, 7]


@pytest.mark.parametrize("on_failure", ["rejoin", "shrink"])
@pytest.mark.parametrize("text", ["import no_such_module", WITHOUT_RECOVERY])
def test_a_script_that_fails_before_the_job_begins_is_not_started_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str, on_failure: str
) -> None:
    (path := tmp_path / "worker.py").write_text(PRELUDE.replace("note_membership()\n", "") + text)
    outcome = run_workers([sys.executable, str(path), str(tmp_path)], 2, options={"on_failure": on_failure})
    assert outcome.exit_status == 1
    assert outcome.restart_counts == [0, 0]
    assert "before any rank was a member of the job: it would fail again, so the run ends" in capfd.readouterr().err


def test_a_worker_that_was_not_reached_is_started_again(tmp_path: Path) -> None:
    (path := tmp_path / "worker.py").write_text(PRELUDE.replace("note_membership()\n", "") + UNREACHED)
    outcome = run_workers([sys.executable, str(path), str(tmp_path)], 1, options={"on_failure": "rejoin"})
    assert outcome == Outcome(codes=[0], restart_counts=[1])


def test_nobody_is_started_again_once_one_has_finished(run: Callable[..., Outcome], tmp_path: Path) -> None:
    outcome = run("if rank == 1:\n    wait_for_end('start-0-1')\n    sys.exit(2)", 2, on_failure="rejoin")
    assert outcome.exit_status == 2
    assert starts(tmp_path, 1) == 1


def test_the_environment_may_ask_for_restarts_too(
    run: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSEIDON_ON_FAILURE", "rejoin")
    assert run("sys.exit(starts < 3)", 1).exit_status == 0
    assert starts(tmp_path, 0) == 3
    assert run("sys.exit(starts < 9)", 1, on_failure="abort").exit_status == 1, "the command line beats it"
    assert starts(tmp_path, 0) == 4


def test_a_signal_ends_the_run_and_restarts_nobody(tmp_path: Path) -> None:
    path = tmp_path / "worker.py"
    path.write_text(PRELUDE + "stay()")
    process = subprocess.Popen(
        [*POSEIDON, "run", "-n", "2", "--on-failure", "rejoin", str(path), str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: starts(tmp_path, 0) + starts(tmp_path, 1) == 2, "both workers")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "started again" not in errors
    assert (starts(tmp_path, 0), starts(tmp_path, 1)) == (1, 1)


@pytest.mark.parametrize(
    ("max_restarts", "options", "expected"),
    [
        (1, {}, "workers are only started again with --on-failure rejoin or shrink"),
        (-1, {"on_failure": "shrink"}, "the number of restarts is -1"),
        (1, {"on_failure": "rejoice"}, "--on-failure is 'rejoice'"),
    ],
)
def test_what_cannot_be(run: Callable[..., Outcome], max_restarts: int, options: dict[str, str], expected: str) -> None:
    with pytest.raises(InvalidArgument, match="^" + expected):
        run("", 1, max_restarts=max_restarts, **options)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("on_failure", ["rejoin", "shrink"])
def test_workers_form_the_next_generation(
    run: Callable[..., Outcome], tmp_path: Path, on_failure: str, victim: int
) -> None:
    outcome = run(TRAINING.replace("VICTIM", str(victim)), 3, on_failure=on_failure, timeout=30)
    assert outcome.exit_status == 0
    assert outcome.restart_counts[victim] == 1
    ends = [(tmp_path / f"end-{rank}").read_text().split() for rank in range(3)]
    generations = {int(generation) for generation, _, _ in ends}
    if on_failure == "rejoin":
        assert generations == {2}
    elif victim == 0:
        assert min(generations) >= 2, "the store has gone with rank 0: numbers that it may have given are left out"
    else:
        assert generations <= {2, 3}, "the others may have gone on without it first"
    assert [joining for _, joining, _ in ends] == [str(rank == victim) for rank in range(3)]
    assert {total for _, _, total in ends} == {"3.0"}


MISUSE = """\
from poseidon.errors import InvalidArgument
from poseidon.failure_marks import leave_mark

if rank == 0: stay()
error = InvalidArgument("two features exclude each other")
leave_mark(error)
raise error
"""


@pytest.mark.parametrize("on_failure", ["rejoin", "shrink"])
def test_a_member_that_asks_for_what_cannot_be_is_not_started_again(
    run: Callable[..., Outcome], capfd: pytest.CaptureFixture[str], on_failure: str
) -> None:
    outcome = run(MISUSE, 2, max_restarts=3, on_failure=on_failure)
    assert outcome.restart_counts == [0, 0]
    assert outcome.first_failure == Failure(1, 1)
    assert "asking for what cannot be: it would fail again, so the run ends" in capfd.readouterr().err
