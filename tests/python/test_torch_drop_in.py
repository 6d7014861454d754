"""Programs that know only torch.distributed train with Poseidon, without a changed line."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import poseidon.torch as poseidon
from forked import run_script
from poseidon.errors import InvalidArgument
from poseidon.launch import free_port
from waiting import IN_PROGRAMS
from workers import job_variables

POSEIDON = [sys.executable, "-m", "poseidon"]
DROP_IN = "poseidon.torch.drop_in"
TORCHS = {"class": nn.parallel.DistributedDataParallel}  # where replace_ddp() does not find it

# What users have: no word of Poseidon.
TRAIN = """
    import sys

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    from network import make_network

    def train(folder, rank):
        torch.set_num_threads(1)
        torch.manual_seed(rank)
        model = DDP(make_network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(5):
            optimizer.zero_grad()
            model(torch.randn(6, 1, 8, 8)).square().mean().backward()
            optimizer.step()
        torch.save(model.module.state_dict(), f"{folder}/{rank}.pt")
        print(f"rank {rank} of {dist.get_world_size()} has used {type(model).__module__} {sys.argv[2:]}")

    def main():
        dist.init_process_group("gloo")
        train(sys.argv[1], dist.get_rank())
        dist.destroy_process_group()

    if __name__ == "__main__":
        main()
"""

SPAWN = """
    import sys

    import torch.distributed as dist
    import torch.multiprocessing as mp

    from train import train

    def worker(rank, folder, port):
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        train(folder, rank)
        dist.destroy_process_group()

    if __name__ == "__main__":
        mp.spawn(worker, args=tuple(sys.argv[1:3]), nprocs=2)
"""

# Rank 0 sends its buffers before the forward pass, waits for nobody, and leaves while rank 1 is still on its way.
EVALUATE = """
    import os
    import sys
    from pathlib import Path

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    from network import make_network

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pid = Path(sys.argv[1], "pid of rank 0")
    if rank == 0:
        pid.write_text(str(os.getpid()))
    network = make_network()
    model = DDP(network)
    model(torch.ones(2, 1, 8, 8)).sum().backward()
    model.eval()
    network[1].running_mean.fill_(rank + 1)  # what rank 0 sends overwrites it
    if rank == 1:
        happens(lambda: not runs(int(pid.read_text())), 1)
    if rank == 0 or sys.argv[2] == "all":
        with torch.no_grad():
            model(torch.ones(2, 1, 8, 8))
    torch.save(network.state_dict(), f"{sys.argv[1]}/{rank}.pt")
    dist.destroy_process_group()
"""

NETWORK = """
    from torch import nn

    def make_network():
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 64), nn.Linear(64, 9)
        )
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    for name, text in (("train", TRAIN), ("spawn", SPAWN), ("evaluate", EVALUATE), ("network", NETWORK)):
        (folder / f"{name}.py").write_text((IN_PROGRAMS if name == "evaluate" else "") + textwrap.dedent(text))
    return folder


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**environment, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    return done


def states(folder: Path) -> list[dict[str, torch.Tensor]]:
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def torchs(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What the program comes to with torch's class."""
    folder = tmp_path_factory.mktemp("torchs")
    port = free_port()
    environments = [{**os.environ, **job_variables(rank, 2, port)} for rank in range(2)]
    said = run_script([str(programs / "train.py"), str(folder)], environments, folder, timeout_s=120)
    assert "rank 0 of 2 has used torch.nn.parallel.distributed []" in said[0]
    return states(folder)[0]


def check(folder: Path, torchs: dict[str, torch.Tensor], done: subprocess.CompletedProcess[str]) -> None:
    """Both ranks have trained with Poseidon, to the same bits, and to what torch comes to."""
    first, second = states(folder)
    assert list(first) == list(torchs)
    for name, value in first.items():
        if "running" not in name:  # rank 1's statistics are its own after the last forward pass, in torch, too
            assert torch.equal(value, second[name]), name
        torch.testing.assert_close(value, torchs[name])
    for rank in range(2):
        assert f"rank {rank} of 2 has used poseidon.torch.ddp" in done.stdout
    assert done.stderr.count("poseidon: drop-in: torch.nn.parallel.DistributedDataParallel is poseidon.torch's") == 1
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr


def test_poseidon_run(programs: Path, torchs: dict[str, torch.Tensor], tmp_path: Path) -> None:
    done = run(*POSEIDON, "run", "-n", "2", "--drop-in", str(programs / "train.py"), str(tmp_path), "--lr", "-m")
    check(tmp_path, torchs, done)
    assert "['--lr', '-m']" in done.stdout


@pytest.mark.parametrize(("who", "of_rank_1"), [("all", 1.0), ("rank 0", 2.0)])
def test_the_rank_that_evaluates_first_may_end_first(
    programs: Path, tmp_path: Path, who: str, of_rank_1: float
) -> None:
    done = run(*POSEIDON, "run", "-n", "2", "--drop-in", str(programs / "evaluate.py"), str(tmp_path), who)
    means = [state["1.running_mean"].tolist() for state in states(tmp_path)]
    assert means == [[1.0] * 4, [of_rank_1] * 4]
    assert "Error" not in done.stderr


def test_torchrun_and_a_module(
    programs: Path, torchs: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(programs)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    check(tmp_path, torchs, run(*torchrun, "-m", DROP_IN, "-m", "train", str(tmp_path)))


def test_processes_that_the_program_spawns(programs: Path, torchs: dict[str, torch.Tensor], tmp_path: Path) -> None:
    done = run(sys.executable, "-m", DROP_IN, str(programs / "spawn.py"), str(tmp_path), str(free_port()))
    check(tmp_path, torchs, done)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "usage: python -m poseidon.torch.drop_in SCRIPT"),
        (["-m"], "usage: python -m poseidon.torch.drop_in SCRIPT"),
        (["--lr", "train.py"], "usage: python -m poseidon.torch.drop_in SCRIPT"),
        (["no.py"], "poseidon: there is no script no.py: give its path, or the name of a module with -m"),
    ],
)
def test_what_cannot_be_run(arguments: list[str], expected: str) -> None:
    from poseidon.torch.drop_in import main

    with pytest.raises(SystemExit, match="^" + expected) as ended:
        main(arguments)
    assert isinstance(ended.value.code, str), "shown on standard error, with exit status 1"


@pytest.fixture
def replaced() -> Iterator[None]:
    restore = poseidon.replace_ddp()
    yield
    restore()


@pytest.mark.usefixtures("replaced")
def test_the_class_is_replaced_wherever_it_was_imported() -> None:
    assert nn.parallel.DistributedDataParallel is poseidon.DistributedDataParallel
    assert nn.parallel.distributed.DistributedDataParallel is poseidon.DistributedDataParallel
    poseidon.replace_ddp()()  # once more, and back by as much
    assert nn.parallel.DistributedDataParallel is poseidon.DistributedDataParallel


def test_modules_that_hold_torchs_class(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[__name__]
    monkeypatch.setattr(module, "DDP", TORCHS["class"], raising=False)
    restore = poseidon.replace_ddp()
    try:
        assert module.DDP is poseidon.DistributedDataParallel  # type: ignore[attr-defined]
    finally:
        restore()
    assert module.DDP is TORCHS["class"]  # type: ignore[attr-defined]
    assert nn.parallel.DistributedDataParallel is TORCHS["class"]


def test_a_class_that_is_derived_already_is_refused() -> None:
    derived = type("Derived", (TORCHS["class"],), {"__module__": "somewhere"})
    with pytest.raises(InvalidArgument, match=r"^somewhere.Derived is derived from torch's DistributedDataParallel al"):
        poseidon.replace_ddp()
    assert nn.parallel.DistributedDataParallel is TORCHS["class"]
    del derived
    import gc

    gc.collect()
    poseidon.replace_ddp()()
