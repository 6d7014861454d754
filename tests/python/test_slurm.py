"""A worker's place in its job as Slurm tells it."""

from __future__ import annotations

import os

import pytest

import launcher_variables
import poseidon.torch as poseidon
import workers
from poseidon.errors import InvalidArgument, PoseidonError
from poseidon.launch import free_port
from poseidon.options import Settings, World, resolve
from poseidon.options.slurm import slurm_place

STEP = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "11",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURM_STEP_NODELIST": "node[07-08,11]",
    "SLURM_JOB_NODELIST": "node[01-20]",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "2",
}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher_variables.remove(monkeypatch)


def settings(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> Settings:
    launcher_variables.given(monkeypatch, variables)
    return resolve()


def test_a_step_says_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    found = settings(monkeypatch, STEP)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (5, 11, 1, 4)
    assert (found.master_addr, found.sources["rank"]) == ("node07", "Slurm")
    assert 15000 <= found.master_port < 30000


def test_processes_of_a_step_agree_on_the_port_and_steps_do_not_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = {
        settings(monkeypatch, {**STEP, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).master_port
        for job in (1000, 1001, 1002)
        for step in (0, 1, 2)
        for _ in range(2)
    }
    assert len(ports) == 9


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node7", "node7"),
        ("node7,other", "node7"),
        ("node[01-03]", "node01"),
        ("node[7,9-11],gpu", "node7"),
        ("rack[2-3]n[005-006].site", "rack2n005.site"),
        ("10.0.0.4", "10.0.0.4"),
    ],
)
def test_the_first_host_serves_the_store(hosts: str, first: str) -> None:
    place = slurm_place({**STEP, "SLURM_STEP_NODELIST": hosts})
    assert place["master_addr"] == ("SLURM_STEP_NODELIST", first)
    place = slurm_place({**STEP, "SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": hosts})
    assert place["master_addr"] == ("SLURM_JOB_NODELIST", first)


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({"SLURM_NODEID": "2"}, 3),
        ({"SLURM_STEP_TASKS_PER_NODE": "", "SLURM_TASKS_PER_NODE": "2,9"}, 9),
        ({"SLURM_STEP_TASKS_PER_NODE": "", "SLURM_NTASKS_PER_NODE": "6"}, 6),
        ({"SLURM_STEP_TASKS_PER_NODE": "", "SLURM_NTASKS_PER_NODE": "64"}, 11),  # the job's, where a step has fewer
        ({"SLURM_STEP_TASKS_PER_NODE": ""}, 1),
    ],
)
def test_tasks_of_this_machine(monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], count: int) -> None:
    found = settings(monkeypatch, {**STEP, "SLURM_LOCALID": "0", **changes})
    assert found.local_world_size == count


def test_other_launchers_and_the_user_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found = settings(monkeypatch, {**STEP, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"})
    assert (found.rank, found.master_addr, found.master_port) == (5, "10.0.0.1", 4000)
    assert resolve(World(1, 2)).world_size == 2
    found = settings(monkeypatch, {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"})
    assert (found.rank, found.world_size, found.local_world_size) == (0, 2, 2)


def test_not_started_by_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        settings(monkeypatch, {name: value for name, value in STEP.items() if name != "SLURM_PROCID"}).world_size == 1
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"SLURM_STEP_NODELIST": "[]"},
            r"SLURM_STEP_NODELIST is '\[\]', whose first host cannot be read: set MASTER_A",
        ),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(y2)"}, r"SLURM_STEP_TASKS_PER_NODE is '4\(y2\)', which is no list of tasks"),
        ({"SLURM_PROCID": "first"}, "SLURM_PROCID is 'first': it must be a whole number"),
    ],
)
def test_what_cannot_be_read(monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], expected: str) -> None:
    with pytest.raises(InvalidArgument, match="^" + expected):
        settings(monkeypatch, {**STEP, **changes})


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"},  # in the shell of salloc
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "POSEIDON_TIMEOUT": "0.5"},  # who knows
    ],
)
def test_a_batch_script_that_forgets_srun_is_told_so(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    launcher_variables.given(monkeypatch, variables)
    with pytest.raises(PoseidonError, match=r"SLURM_NTASKS is 4, and srun did not start this process.*srun python"):
        poseidon.init(master_addr="127.0.0.1", master_port=free_port(), flight_record="off")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    poseidon.init()  # one task needs no srun
    assert poseidon.world_size() == 1
    poseidon.shutdown()


def under_srun() -> tuple[int, int]:
    variables = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    del os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    os.environ.update(SLURM_PROCID=variables["RANK"], SLURM_NTASKS="3", SLURM_LOCALID=variables["RANK"])
    os.environ.update(SLURM_TASKS_PER_NODE="3", SLURM_JOB_NODELIST="localhost", SLURM_JOB_ID=str(os.getppid()))
    poseidon.init()
    return poseidon.rank(), poseidon.world_size()


def test_workers_meet() -> None:
    assert workers.run_fresh(3, under_srun) == [(0, 3), (1, 3), (2, 3)]
