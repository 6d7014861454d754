"""With update="server", a script may end on one rank while another reads what the servers keep."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

import poseidon.torch as poseidon
from forked import FORK
from poseidon.launch import free_port
from waiting import compute_for, end, wait_for
from workers import job_variables


def _train(rank: int, port: int, how: str, folder: Path) -> None:
    os.environ.update(job_variables(rank, 2, port))
    torch.set_num_threads(1)
    poseidon.init(flight_record="off")
    model = poseidon.DistributedDataParallel(torch.nn.Linear(64, 512))
    inner = torch.optim.AdamW(model.parameters())
    optimizer = poseidon.DistributedOptimizer(inner, model, update="server")
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(8, 64)).square().mean().backward()
        optimizer.step()
    if rank == 0:
        wait_for(folder / "the other one leaves")
        compute_for(0.3)
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        torch.save(optimizer.state_dict(), folder / "state.pt")
        return
    (folder / "the other one leaves").touch()
    if how == "shuts down":
        poseidon.shutdown()


@pytest.mark.parametrize("how", ["ends", "shuts down", "is killed"])
def test_the_others_servers_go_on(how: str, tmp_path: Path) -> None:
    port = free_port()
    ranks = [FORK.Process(target=_train, args=(rank, port, how, tmp_path)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(20)
    codes = [process.exitcode for process in ranks]
    end(*ranks)
    assert codes == [-signal.SIGKILL if how == "is killed" else 0, 0]
    if how != "is killed":
        state = torch.load(tmp_path / "state.pt")["state"]
        assert [float(state[index]["step"]) for index in range(2)] == [3.0, 3.0]
        assert all(state[index]["exp_avg"].abs().sum() > 0 for index in range(2))
