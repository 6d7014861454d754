"""A worker's place in its job as mpirun tells it."""

from __future__ import annotations

import os

import pytest

import launcher_variables
import poseidon.torch as poseidon
import workers
from launcher_variables import given
from poseidon.errors import InvalidArgument
from poseidon.options import resolve

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_MCA_ess_base_jobid": "433979393",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
ONE_MACHINE = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "5"}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher_variables.remove(monkeypatch)


def test_several_machines_need_the_address_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, OPEN_MPI)
    with pytest.raises(InvalidArgument, match=r"^MASTER_ADDR is missing while WORLD_SIZE is 8: set it to the addr"):
        resolve()
    given(monkeypatch, {"MASTER_ADDR": "node1", "MASTER_PORT": "4000"})
    found = resolve()
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (5, 8, 1, 4)
    assert (found.master_addr, found.sources["rank"]) == ("node1", "MPI")


def test_on_one_machine_jobs_have_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = set()
    for job in ("433979393", "433979394"):
        given(monkeypatch, {**ONE_MACHINE, "OMPI_MCA_ess_base_jobid": job})
        found = resolve()
        assert (found.rank, found.master_addr) == (5, "127.0.0.1")
        ports.add(found.master_port)
    assert len(ports) == 2
    assert all(15000 <= port < 30000 for port in ports)


def test_hydra_says_no_job_so_the_port_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, HYDRA)
    with pytest.raises(InvalidArgument, match=r"^MASTER_PORT is missing while WORLD_SIZE is 2"):
        resolve()
    given(monkeypatch, {"MASTER_PORT": "4000"})
    found = resolve()
    assert (found.rank, found.world_size, found.master_addr) == (1, 2, "127.0.0.1")


def test_mpirun_within_a_slurm_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """All its processes on the first machine have the batch script's SLURM_PROCID."""
    script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "node[1-2]"}
    given(monkeypatch, {**OPEN_MPI, **script})
    found = resolve()
    assert (found.rank, found.world_size, found.master_addr, found.local_rank) == (5, 8, "node1", 1)


def test_the_user_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, {**ONE_MACHINE, "RANK": "0", "WORLD_SIZE": "1"})
    assert resolve().world_size == 1


def under_mpirun() -> tuple[int, int]:
    rank = os.environ.pop("RANK")
    for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    os.environ.update(dict.fromkeys(("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"), rank))
    os.environ.update(dict.fromkeys(("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"), "3"))
    os.environ["PMIX_NAMESPACE"] = f"prterun-{os.getppid()}@1"
    poseidon.init()
    return poseidon.rank(), poseidon.world_size()


def test_workers_meet() -> None:
    assert workers.run_fresh(3, under_mpirun) == [(0, 3), (1, 3), (2, 3)]
