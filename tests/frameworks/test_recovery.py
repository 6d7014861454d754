"""Programs of other libraries whose workers are killed: they train what they train undisturbed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from killed_runs import run_killed
from runs import PROGRAMS, printed_by, skip_without

KILLS = 6


def assert_unmoved_by_kills(tmp_path: Path, program: str, steps: int, *words: str) -> list[Any]:
    """The answers of a run whose workers were killed, after they have been compared with those of another one."""
    calm = run_killed(tmp_path / "calm", PROGRAMS / program, str(tmp_path / "calm"), *words)
    killed = run_killed(
        tmp_path / "killed", PROGRAMS / program, str(tmp_path / "killed"), *words, steps=steps, kills=KILLS
    )
    assert len({one["digest"] for one in (*calm.answers, *killed.answers)}) == 1, killed.printed
    assert max(one["failures"] for one in killed.answers) >= KILLS // 2, killed.printed
    kept = [
        {name: value for name, value in one.items() if name != "failures"} for one in (*calm.answers, *killed.answers)
    ]
    assert all(one == kept[0] for one in kept), killed.printed
    return killed.answers


def test_trainer(tmp_path: Path) -> None:
    skip_without("transformers")
    found = assert_unmoved_by_kills(tmp_path, "transformers_recovery.py", 54)
    assert found[0]["steps"] == 54


def test_lightning(tmp_path: Path) -> None:
    skip_without("lightning")
    found = assert_unmoved_by_kills(tmp_path, "lightning_recovery.py", 56)
    assert (found[0]["steps"], found[0]["epochs"]) == (56, 8)


def test_accelerate(tmp_path: Path) -> None:
    skip_without("accelerate")
    found = assert_unmoved_by_kills(tmp_path, "accelerate_recovery.py", 60)
    assert found[0]["lr"] == pytest.approx([0.01 * 0.99**60])


def test_what_a_replacement_could_not_follow_is_refused(tmp_path: Path) -> None:
    skip_without("transformers", "lightning")
    printed = printed_by([str(PROGRAMS / "recovery_refusals.py"), str(tmp_path)], tmp_path)
    found = json.loads(
        next(line for line in printed.splitlines() if line.startswith("REFUSALS ")).removeprefix("REFUSALS ")
    )
    expected = {
        "own loader": "OwnLoader has a loader or sampler of its own",
        "own sampler": "OwnSampler has a loader or sampler of its own",
        "by length": "not by group_by_length",
        "several loaders": "there are several",
        "some examples": "has a RandomSampler of its own",
        "average of weights": "EMAWeightAveraging keeps what it remembers by on_save_checkpoint",
        "no loss": "training_step returned None",
        "manual": "with manual optimization the module makes them",
        "prepared loader": "gives all workers the same batches",
    }
    assert found.keys() == expected.keys()
    for name, text in expected.items():
        assert text in found[name], name
