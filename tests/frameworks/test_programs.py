"""Programs for torch's DistributedDataParallel train with Poseidon in its place, unchanged, to the same parameters."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE / "programs"
TIMEOUT_S = 300  # ten seconds, when nothing else runs
RANKS = 2
# What else each needs; `make test-frameworks` installs it.
NEEDS: dict[str, tuple[str, ...]] = {
    "nanogpt_like.py": (),
    "mingpt_like.py": (),
    "imagenet_like.py": (),
    "transformers_trainer.py": ("transformers", "accelerate"),
    "accelerate_loop.py": ("accelerate",),
    "lightning_fit.py": ("lightning",),
    "timm_loop.py": ("timm",),
    "peft_lora.py": ("transformers", "peft"),
}
POSEIDON_RUN = ["-m", "poseidon", "run", "-n", str(RANKS)]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
DROP_IN = ["-m", "poseidon.torch.drop_in"]
SAYS_SO = "poseidon.torch.DistributedDataParallel"

State = dict[str, torch.Tensor]


def skip_without(program: str) -> None:
    for package in NEEDS[program]:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed: make test-frameworks")


def environment() -> dict[str, str]:
    """Layers on their own, each by its cheapest scheme, although all here are small."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    extra = {"OMP_NUM_THREADS": "1", "POSEIDON_SMALL_BYTES": "256", "PYTHONWARNINGS": "ignore"}
    if find_spec("torchvision") is None:
        extra["PYTHONPATH"] = str(HERE / "stand_in")
    return {**kept, **extra}


def train(start: list[str], program: str, folder: Path, *arguments: str) -> tuple[list[State], str]:
    """Each rank's state dict after the program has run, and what it printed."""
    folder.mkdir()
    command = [sys.executable, *start, str(PROGRAMS / program), str(folder), *arguments]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S, cwd=folder, check=False
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, f"{command} failed:\n{printed}"
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(RANKS)], printed


def assert_same_bits(states: list[State]) -> None:
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        different = [name for name, tensor in state.items() if not torch.equal(tensor, states[0][name])]
        assert different == []


def assert_same_training(ours: list[State], theirs: list[State], printed: str, theirs_printed: str) -> None:
    assert SAYS_SO in printed
    assert SAYS_SO not in theirs_printed
    assert_same_bits(theirs)
    assert_same_bits(ours)
    assert ours[0].keys() == theirs[0].keys()
    for name, tensor in ours[0].items():
        torch.testing.assert_close(
            tensor, theirs[0][name], rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("program", NEEDS)
def test_a_program_trains_unchanged(program: str, tmp_path: Path) -> None:
    skip_without(program)
    theirs, theirs_printed = train(POSEIDON_RUN, program, tmp_path / "theirs")
    ours, printed = train([*POSEIDON_RUN, "--drop-in"], program, tmp_path / "ours")
    assert_same_training(ours, theirs, printed, theirs_printed)


@pytest.mark.parametrize("program", ["transformers_trainer.py", "lightning_fit.py"])
def test_a_program_trains_unchanged_under_torchrun(program: str, tmp_path: Path) -> None:
    skip_without(program)
    theirs, theirs_printed = train(TORCHRUN, program, tmp_path / "theirs")
    ours, printed = train([*TORCHRUN, *DROP_IN], program, tmp_path / "ours")
    assert_same_training(ours, theirs, printed, theirs_printed)


def test_a_compiled_program_trains_unchanged(tmp_path: Path) -> None:
    theirs, theirs_printed = train(POSEIDON_RUN, "nanogpt_like.py", tmp_path / "theirs", "--compile")
    ours, printed = train([*POSEIDON_RUN, "--drop-in"], "nanogpt_like.py", tmp_path / "ours", "--compile")
    assert_same_training(ours, theirs, printed, theirs_printed)
