"""Programs for torch's DistributedDataParallel train with Poseidon in its place, unchanged, to the same parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from runs import (
    DROP_IN,
    POSEIDON_RUN,
    TORCHRUN,
    TORCHRUN_4,
    Trained,
    assert_same_states,
    assert_same_training,
    skip_without,
    train,
    train_with_torchs_class,
)

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


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """What a program makes with PyTorch's own class."""

    @cache
    def trained(program: str) -> Trained:
        folder = tmp_path_factory.mktemp("plain") / program
        # A framework of its own may mind how its process began.
        return train(POSEIDON_RUN, program, folder) if NEEDS[program] else train_with_torchs_class(program, folder)

    return trained


@pytest.mark.parametrize("program", NEEDS)
def test_a_program_trains_unchanged(program: str, tmp_path: Path, plain: Callable[[str], Trained]) -> None:
    skip_without(*NEEDS[program])
    assert_same_training(train([*POSEIDON_RUN, "--drop-in"], program, tmp_path / "ours"), plain(program))


@pytest.mark.parametrize("program", ["transformers_trainer.py", "lightning_fit.py"])
def test_a_program_trains_unchanged_under_torchrun(
    program: str, tmp_path: Path, plain: Callable[[str], Trained]
) -> None:
    skip_without(*NEEDS[program])
    assert_same_training(train([*TORCHRUN, *DROP_IN], program, tmp_path / "ours"), plain(program))


@pytest.mark.parametrize(("package", "start"), [("lightning", TORCHRUN), ("accelerate", TORCHRUN_4)])
def test_a_sharded_program_trains_unchanged(package: str, start: list[str], tmp_path: Path) -> None:
    skip_without(package)
    theirs = train(start, f"{package}_sharded.py", tmp_path / "theirs")
    ours = train([*start, *DROP_IN], f"{package}_sharded.py", tmp_path / "ours")
    assert len(ours[0]) == int(start[-1])
    assert "replicas over gloo" in theirs[1]
    assert "replicas over poseidon" in ours[1]
    assert_same_training(ours, theirs)


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
    skip_without(*NEEDS[program])
    assert_same_training(train([*POSEIDON_RUN, "--drop-in"], overlapping, tmp_path / "ours"), plain(program))


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_lightning_takes_the_strategy(package: str, tmp_path: Path, plain: Callable[[str], Trained]) -> None:
    skip_without("lightning", package.partition(".")[0])
    ours, _ = train(POSEIDON_RUN, "lightning_strategy.py", tmp_path / "ours", package)
    assert_same_states(ours, plain("lightning_fit.py")[0])
