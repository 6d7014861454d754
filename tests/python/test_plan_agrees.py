"""With revise=off a plan and the training that it plans agree on every parameter, byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("poseidon._core")
pytest.importorskip("torch")

import workers
from plan_agreement import RANKS, SMALL_BYTES, planned, train_and_plan
from plan_models import EXPERTS

HERE = Path(__file__).resolve().parent
PERIODS = 4


def test_parameters_that_forward_hides_are_planned_as_they_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)
    expected = planned("plan_models:kinds")
    answers = workers.run(
        RANKS, train_and_plan, "plan_models:kinds", str(HERE), PERIODS * EXPERTS, small_bytes=SMALL_BYTES, revise="off"
    )
    assert expected == answers[0] == answers[1]
    assert expected["attention.out_proj.weight"][2] > 0
    assert expected["unused.weight"][2] == 0
    schemes = {scheme for scheme, _, _, _ in expected.values()}
    assert {"ps", "sfb", "rows"} <= schemes, schemes
