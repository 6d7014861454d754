"""What identifies a run, and that a second job at the same address does not take the first one's places."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest
import torch

import poseidon.torch as poseidon
from forked import FORK
from poseidon.errors import Refused
from poseidon.launch import free_port
from poseidon.options.run_identity import run_of
from waiting import compute_for, end, wait_for, wait_until
from workers import job_variables

AGENT = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2"}


@pytest.mark.parametrize(
    ("environment", "source", "run"),
    [
        ({}, "environment", ""),
        ({"POSEIDON_RUN": "a", **AGENT, **SLURM}, "environment", "poseidon run a"),
        (AGENT, "environment", "torchrun none"),
        ({"TORCHELASTIC_RUN_ID": "none"}, "environment", ""),  # of every run that was given no name
        ({"TORCHELASTIC_RUN_ID": "b", **SLURM}, "environment", "torchrun b"),
        (SLURM, "Slurm", "Slurm job 7, step 2, restart 0"),
        ({**SLURM, "SLURM_RESTART_COUNT": "1"}, "Slurm", "Slurm job 7, step 2, restart 1"),
        (SLURM, "environment", ""),  # started by hand within a step
        ({"PMIX_NAMESPACE": "c", **SLURM}, "MPI", "mpirun c"),
        ({"PMI_RANK": "0"}, "MPI", ""),
    ],
)
def test_it_comes_from_the_launcher(environment: dict[str, str], source: str, run: str) -> None:
    assert run_of({"rank": source}, environment) == run


def _train(rank: int, port: int, run: str, folder: Path) -> None:
    """Trains until there is a file `end`. Writes what it did."""
    os.environ.update(job_variables(rank, 2, port) | {"POSEIDON_TIMEOUT": "6"})
    os.environ.pop("POSEIDON_RUN", None)
    if run:
        os.environ["POSEIDON_RUN"] = run
    torch.set_num_threads(1)
    with (folder / f"errors-{rank}").open("w", buffering=1) as errors, contextlib.redirect_stderr(errors):
        poseidon.init(on_failure="rejoin", flight_record="off")
        model = poseidon.DistributedDataParallel(torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        try:
            recovery = poseidon.Recovery(model, optimizer)
        except Refused as error:
            (folder / f"refused-{rank}").write_text(str(error))
            return
        end = sys.maxsize
        while recovery.until(end):
            with recovery.attempt():
                optimizer.zero_grad()
                is_last = torch.tensor(float((folder / "end").exists() and recovery.step > 2))
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                poseidon.all_reduce(is_last)
                if is_last.item():
                    end = recovery.step + 1
                (folder / f"step-{rank}").write_text(f"{recovery.step} {len(recovery.history)}")
                compute_for(0.05)


def _start(run: str, port: int, folder: Path) -> list[FORK.Process]:  # type: ignore[name-defined]
    folder.mkdir()
    processes = [FORK.Process(target=_train, args=(rank, port, run, folder)) for rank in range(2)]
    for process in processes:
        process.start()
    return processes


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        ("one", "two", "is another run (poseidon run one, and this process is of poseidon run two)"),
        ("", "", "goes on at this address, and its rank"),
    ],
)
def test_a_second_job_at_one_address_is_refused_at_both_sides(
    first: str, second: str, why: str, tmp_path: Path
) -> None:
    port = free_port()
    mine, theirs = tmp_path / "first", tmp_path / "second"
    members = _start(first, port, mine)
    wait_for(mine / "step-1")
    strangers = _start(second, port, theirs)
    for process in strangers:
        process.join(20)
    assert [why in (theirs / f"refused-{rank}").read_text() for rank in range(2)] == [True, True]
    wait_until(lambda: "was refused: " in (mine / "errors-0").read_text(), "rank 0 to tell of it")
    (mine / "end").touch()
    for process in members:
        process.join(20)
    end(*(members + strangers))
    assert [process.exitcode for process in members] == [0, 0]
    assert (mine / "step-0").read_text().endswith(" 0")  # no generation after the first
