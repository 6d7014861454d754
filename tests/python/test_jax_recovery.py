"""poseidon.jax.Recovery: what is trained does not depend on workers that are killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from killed_runs import run_killed

pytest.importorskip("poseidon._core", reason="the compiled core is not built")
pytest.importorskip("jax")

PROGRAM = Path(__file__).with_name("jax_recovery.py")
STEPS = 60
ON_WIRES = {"POSEIDON_TRANSPORT": "tcp", "POSEIDON_SMALL_BYTES": "256", "JAX_PLATFORMS": "cpu"}  # factors pay there


@pytest.mark.parametrize("words", [(), ("donate",)], ids=["kept", "donated"])
def test_six_kills_leave_the_bits_of_an_undisturbed_run(tmp_path: Path, words: tuple[str, ...]) -> None:
    calm = run_killed(tmp_path / "calm", PROGRAM, "train", str(STEPS), *words, steps=STEPS, kills=0, **ON_WIRES)
    killed = run_killed(tmp_path / "killed", PROGRAM, "train", str(STEPS), *words, steps=STEPS, kills=6, **ON_WIRES)
    digests = {one["digest"] for one in (*calm.answers, *killed.answers)}
    assert len(digests) == 1, killed.printed
    assert calm.answers[0]["schemes"] == {"['b0']": "ps", "['w0']": "sfb", "['w1']": "sfb"}
    assert max(one["failures"] for one in killed.answers) >= 3, killed.printed


def test_a_job_that_shrinks_goes_on_with_the_mean_over_those_who_are_left(tmp_path: Path) -> None:
    shrunk = run_killed(
        tmp_path / "shrunk", PROGRAM, "train", "40", steps=40, kills=0, on_failure="shrink", DIES="1 9", **ON_WIRES
    )
    assert [one["sizes"] for one in shrunk.answers] == ["3" * 9 + "2" * 31] * 2, shrunk.printed
    assert shrunk.answers[0]["digest"] == shrunk.answers[1]["digest"]


def test_an_attempt_that_does_not_take_the_state_is_refused(tmp_path: Path) -> None:
    (texts,) = run_killed(tmp_path / "run", PROGRAM, "misuse", workers=1, on_failure="abort", **ON_WIRES).answers
    assert "did not read recovery.state" in texts["unread"]
    assert "assigned nothing to recovery.state" in texts["unset"]
    assert "recovery.state had \"['w'] float32 (3,)\" and is to have \"['w'] float32 (2,)\"" in texts["reshaped"]
    assert "given no array" in texts["empty"]


def test_exchanges_before_the_workers_have_met_are_refused(tmp_path: Path) -> None:
    for texts in run_killed(tmp_path / "run", PROGRAM, "early", workers=2, **ON_WIRES).answers:
        for text, caller in zip(texts, ("value_and_grad", "all_reduce", "broadcast"), strict=True):
            assert f"{caller}() before poseidon.Recovery with on_failure=rejoin" in text


def test_a_run_goes_on_from_its_newest_snapshot(tmp_path: Path) -> None:
    def made(name: str, steps: int, directory: str) -> list[Any]:
        return run_killed(
            tmp_path / name,
            PROGRAM,
            "snapshots",
            steps=0,
            kills=0,
            workers=2,
            on_failure="abort",
            STEPS=str(steps),
            DIRECTORY=str(tmp_path / directory),
            JAX_PLATFORMS="cpu",
        ).answers

    whole, half, rest = made("1", 20, "whole"), made("2", 10, "halves"), made("3", 20, "halves")
    assert (half[0]["begun"], rest[0]["begun"]) == (0, 10)
    assert [one["w"] for one in rest] == [one["w"] for one in whole]
    assert half[0]["w"] != rest[0]["w"]
