"""Runs a program on two ranks and compares what they have trained."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "python"))

from forked import run_script  # noqa: E402
from poseidon.launch import free_port  # noqa: E402
from workers import job_variables  # noqa: E402

PROGRAMS = HERE / "programs"
TIMEOUT_S = 300  # ten seconds, when nothing else runs
RANKS = 2
POSEIDON_RUN = ["-m", "poseidon", "run", "-n", str(RANKS)]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
TORCHRUN_4 = [*TORCHRUN[:-1], "4"]
DROP_IN = ["-m", "poseidon.torch.drop_in"]
GLOOS_END = "terminate called without an active exception"
SAYS_SO = "poseidon: drop-in: "

State = dict[str, torch.Tensor]
Trained = tuple[list[State], str]  # of each rank; what was printed


def skip_without(*packages: str) -> None:
    """Skips the test that calls it where one of these is not installed."""
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed: make test-frameworks")


def environment() -> dict[str, str]:
    """Layers on their own, each by its cheapest scheme, although all here are small."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    extra = {"OMP_NUM_THREADS": "1", "POSEIDON_SMALL_BYTES": "256", "PYTHONWARNINGS": "ignore"}
    if find_spec("torchvision") is None:
        extra["PYTHONPATH"] = str(HERE / "stand_in")
    return {**kept, **extra}


def printed_by(command: list[str], folder: Path) -> str:
    """What `python COMMAND` prints, run in `folder`; AssertionError with that if it fails."""
    command = [sys.executable, *command]
    for _ in range(3):
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S, cwd=folder, check=False
        )
        printed = done.stdout + done.stderr
        # Now and then gloo's threads end a process that destroys its group, without Poseidon as well (torch 2.13).
        if done.returncode == 0 or GLOOS_END not in printed:
            break
    assert done.returncode == 0, f"{command} failed:\n{printed}"
    return printed


def train(start: list[str], program: str, folder: Path, *arguments: str) -> Trained:
    """Each rank's state dict after the program has run, and what it printed."""
    folder.mkdir(exist_ok=True)
    printed = printed_by([*start, str(PROGRAMS / program), str(folder), *arguments], folder)
    return [torch.load(path) for path in sorted(folder.glob("rank*.pt"))], printed


def train_with_torchs_class(program: str, folder: Path) -> Trained:
    """The same without Poseidon. Each rank is forked, which takes less time than an import of PyTorch."""
    folder.mkdir(exist_ok=True)
    port = free_port()
    ranks = [{**environment(), **job_variables(rank, RANKS, port)} for rank in range(RANKS)]
    for _ in range(2):  # gloo, as above
        with contextlib.suppress(AssertionError):
            return _train_forked(ranks, program, folder)
    return _train_forked(ranks, program, folder)


def _train_forked(ranks: list[dict[str, str]], program: str, folder: Path) -> Trained:
    printed = run_script([str(PROGRAMS / program), str(folder)], ranks, folder, TIMEOUT_S)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(RANKS)], "".join(printed)


def unequal(states: list[State]) -> set[str]:
    """The tensors that are not the same bits on all ranks."""
    return {name for state in states for name, tensor in state.items() if not torch.equal(tensor, states[0][name])}


def assert_same_states(ours: list[State], theirs: list[State]) -> None:
    """But for rounding what PyTorch's own class makes; and what it makes equal on all ranks, to the bit."""
    trained = {name for name in ours[0] if "running_" not in name}  # those each rank may have its own of
    assert unequal(theirs).isdisjoint(trained)
    assert unequal(ours) <= unequal(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for name, tensor in mine.items():
            torch.testing.assert_close(
                tensor, other[name], rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )


def assert_same_training(ours: Trained, theirs: Trained) -> None:
    assert SAYS_SO in ours[1]
    assert SAYS_SO not in theirs[1]
    assert_same_states(ours[0], theirs[0])
