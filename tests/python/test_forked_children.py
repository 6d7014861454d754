"""What a worker has forked does not keep it alive for the others, nor anything of a run whose launcher was killed."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import poseidon.torch as poseidon
from forked import FORK
from poseidon.errors import PoseidonError
from poseidon.launch import free_port
from waiting import IN_PROGRAMS, end, runs, stay, wait_until
from workers import job_variables

CHILDREN = 8


def _lose_a_parent(rank: int, port: int, transport: str, folder: Path) -> None:
    os.environ.update(job_variables(rank, 2, port))
    poseidon.init(transport=transport, flight_record="off")
    poseidon.barrier()
    if rank == 1:
        fork = multiprocessing.get_context("fork")
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # may have children
        children = [fork.Process(target=stay) for _ in range(CHILDREN)]
        for child in children:
            child.start()
        (folder / "children").write_text(" ".join(str(child.pid) for child in children))
        (folder / "killed").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        poseidon.barrier()
    except PoseidonError as error:
        (folder / "known").write_text(f"{time.time()} {error}")


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_killed_rank_is_known_although_its_children_live(transport: str, tmp_path: Path) -> None:
    port = free_port()
    ranks = [FORK.Process(target=_lose_a_parent, args=(rank, port, transport, tmp_path)) for rank in range(2)]
    for process in ranks:
        process.start()
    ranks[0].join(20)
    children = [int(pid) for pid in (tmp_path / "children").read_text().split()]
    assert all(Path(f"/proc/{pid}").exists() for pid in children)  # as many as hold copies of everything
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    end(*ranks)
    known, _, error = (tmp_path / "known").read_text().partition(" ")
    assert re.search("lost (the shard of )?rank 1 ", error)  # whichever connection is looked at first
    assert float(known) - float((tmp_path / "killed").read_text()) < 1


PARENT = f"""{IN_PROGRAMS}
import multiprocessing, os, pathlib
children = [multiprocessing.get_context("fork").Process(target=stay) for _ in range(2)]
for child in children:
    child.start()
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(" ".join(str(child.pid) for child in children))
stay()
"""


STATUS = f"""{IN_PROGRAMS}
import os
def status_of(pid):  # of a child, None if it does not end
    seen = []
    happens(lambda: seen.append(os.waitpid(pid, os.WNOHANG)) or any(seen[-1]), 10)
    if any(seen[-1]):
        return seen[-1][1]
    os.kill(pid, 9)
"""


FORKS = """
import numpy as np
import poseidon
from poseidon import _core
from poseidon.errors import ShutDown

_core.set_leak_warnings(True)

def in_child(exchange, array, handle):
    for call in (lambda: exchange.push_pull("a", array), exchange.barrier, exchange.close, handle.wait):
        try:
            call()
        except ShutDown as error:
            assert f"child of process {os.getppid()}" in str(error)
        else:
            os._exit(3)

exchange, array = poseidon.connect(rank=0, world_size=1), np.ones(4, "float32")
exchange.declare({"a": array})
handle = exchange.push_pull("a", array)
pid = os.fork()
if pid == 0:
    in_child(exchange, array, handle)
    if sys.argv[1] == "with":
        with exchange:
            sys.exit(0)
    if sys.argv[1] == "del":
        del exchange, handle
    sys.exit(0)
status = status_of(pid)
exchange.push_pull("a", array)
exchange.close()
print(status, array[0])
"""


@pytest.mark.parametrize("how", ["exit", "with", "del"])
def test_a_child_has_no_part_in_an_exchange_and_ends(how: str) -> None:
    command = [sys.executable, "-c", STATUS + FORKS, how]
    environment = {**os.environ, "POSEIDON_FLIGHT_RECORD": "off"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=True)
    assert ended.stdout == "0 1.0\n", ended.stderr
    assert "nanobind" not in ended.stderr


TRAINS_AND_FORKS = """
import torch
import poseidon.torch as poseidon

poseidon.init()
model = poseidon.DistributedDataParallel(torch.nn.Linear(8, 8))
model(torch.ones(2, 8)).sum().backward()
if poseidon.rank() == 1:
    pid = os.fork()
    if pid == 0:
        sys.exit(0)
    print(f"status {status_of(pid)}", flush=True)
model(torch.ones(2, 8)).sum().backward()
poseidon.shutdown()
"""


def test_a_child_does_not_wait_for_the_threads_of_its_parents_training(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(STATUS + TRAINS_AND_FORKS)
    command = [
        sys.executable,
        "-m",
        "poseidon",
        "run",
        "-n",
        "2",
        "--flight-record",
        "off",
        str(tmp_path / "program.py"),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "status 0\n" in ended.stdout, ended.stderr
    assert ended.returncode == 0, ended.stderr


def test_a_killed_launcher_leaves_no_children_and_no_folder(tmp_path: Path) -> None:
    script, pids, folders = tmp_path / "parent.py", tmp_path / "pids", tmp_path / "folders"
    script.write_text(PARENT)
    pids.mkdir()
    folders.mkdir()
    launcher = subprocess.Popen(
        [sys.executable, "-m", "poseidon", "run", "-n", "2", str(script), str(pids)],
        env={**os.environ, "TMPDIR": str(folders)},
        stderr=subprocess.DEVNULL,
    )
    wait_until(lambda: len([file for file in pids.iterdir() if file.read_text()]) == 2, "the workers")
    assert any(folders.glob("poseidon-run-*"))
    end(launcher)
    children = [int(pid) for file in pids.iterdir() for pid in file.read_text().split()]
    assert len(children) == 4
    wait_until(lambda: not any(map(runs, children)), "the end of the workers' children", 20)
    wait_until(lambda: not any(folders.iterdir()), "the run's folder to go", 20)
