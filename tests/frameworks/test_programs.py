"""Programs for torch's DistributedDataParallel train with Poseidon in its place, unchanged, to the same parameters."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
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
Trained = tuple[list[State], str]  # of each rank; what was printed


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


def train(start: list[str], program: str, folder: Path, *arguments: str) -> Trained:
    """Each rank's state dict after the program has run, and what it printed."""
    folder.mkdir()
    command = [sys.executable, *start, str(PROGRAMS / program), str(folder), *arguments]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S, cwd=folder, check=False
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, f"{command} failed:\n{printed}"
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(RANKS)], printed


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


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """What a program makes with PyTorch's own class."""

    @cache
    def trained(program: str) -> Trained:
        return train(POSEIDON_RUN, program, tmp_path_factory.mktemp("plain") / program)

    return trained


@pytest.mark.parametrize("program", NEEDS)
def test_a_program_trains_unchanged(program: str, tmp_path: Path, plain: Callable[[str], Trained]) -> None:
    skip_without(program)
    assert_same_training(train([*POSEIDON_RUN, "--drop-in"], program, tmp_path / "ours"), plain(program))


@pytest.mark.parametrize("program", ["transformers_trainer.py", "lightning_fit.py"])
def test_a_program_trains_unchanged_under_torchrun(
    program: str, tmp_path: Path, plain: Callable[[str], Trained]
) -> None:
    skip_without(program)
    assert_same_training(train([*TORCHRUN, *DROP_IN], program, tmp_path / "ours"), plain(program))


def test_a_compiled_program_trains_unchanged(tmp_path: Path) -> None:
    theirs = train(POSEIDON_RUN, "nanogpt_like.py", tmp_path / "theirs", "--compile")
    ours = train([*POSEIDON_RUN, "--drop-in"], "nanogpt_like.py", tmp_path / "ours", "--compile")
    assert_same_training(ours, theirs)


@pytest.mark.parametrize(
    ("program", "overlapping"),
    [("transformers_trainer.py", "transformers_overlap.py"), ("accelerate_loop.py", "accelerate_overlap.py")],
)
def test_updates_overlap_in_hugging_faces_loops(
    program: str, overlapping: str, tmp_path: Path, plain: Callable[[str], Trained]
) -> None:
    skip_without(program)
    assert_same_training(train([*POSEIDON_RUN, "--drop-in"], overlapping, tmp_path / "ours"), plain(program))


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_lightning_takes_the_strategy(package: str, tmp_path: Path, plain: Callable[[str], Trained]) -> None:
    skip_without("lightning_fit.py")
    if find_spec(package.partition(".")[0]) is None:
        pytest.skip(f"{package} is not installed: make test-frameworks")
    ours, _ = train(POSEIDON_RUN, "lightning_strategy.py", tmp_path / "ours", package)
    assert_same_states(ours, plain("lightning_fit.py")[0])
