"""RecoveryCallback of Keras: what is trained does not depend on workers that are killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from killed_runs import run_killed

pytest.importorskip("poseidon._core", reason="the compiled core is not built")
pytest.importorskip("tensorflow")

PROGRAM = Path(__file__).with_name("tensorflow_recovery.py")
STEPS = 48


def test_six_kills_leave_the_bits_of_an_undisturbed_run(tmp_path: Path) -> None:
    calm = run_killed(tmp_path / "calm", PROGRAM)
    killed = run_killed(tmp_path / "killed", PROGRAM, steps=STEPS, kills=6)
    for one in (*calm.answers, *killed.answers):
        assert {**one, "failures": 0} == calm.answers[0], killed.printed
    assert calm.answers[0]["heard"] == STEPS
    assert max(one["failures"] for one in killed.answers) >= 3, killed.printed
