"""With revise=off a plan and its training agree byte for byte on models of other people, and on the layer tables."""

from __future__ import annotations

import pytest

from runs import HERE, skip_without  # it knows where tests/python is

# isort: split

import workers
from plan_agreement import RANKS, SMALL_BYTES, planned, planned_table, train_and_plan
from plan_framework_models import MAKERS, SCALE, TABLES, attribute
from poseidon.models import model_table, scaled

STEPS = 3


def trained(name: str) -> dict[str, tuple[str, str, float, float]]:
    """What training says, the same on all ranks."""
    program = f"plan_framework_models:{name}"
    options = {"small_bytes": SMALL_BYTES, "revise": "off"}
    answers = workers.run(RANKS, train_and_plan, program, str(HERE), STEPS, **options)
    assert answers[0] == answers[1]
    return answers[0]


@pytest.mark.parametrize("name", MAKERS)
def test_the_plan_of_a_model_is_that_of_its_training(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without("timm", "transformers")
    monkeypatch.chdir(HERE)
    expected = trained(name)
    assert planned(f"plan_framework_models:{name}") == expected
    assert sum(size for _, _, size, _ in expected.values()) > 0


@pytest.mark.parametrize("name", TABLES)
def test_the_plan_of_a_table_is_that_of_its_replay(name: str) -> None:
    replayed = {
        layer.removeprefix("layers.").replace(".linear.", "."): row for layer, row in trained(attribute(name)).items()
    }
    table = {
        attribute(layer.rpartition(".")[0]) + "." + layer.rpartition(".")[2]: row
        for layer, row in planned_table(scaled(model_table(name), SCALE), replayed=True).items()
    }
    assert table == {
        attribute(layer.rpartition(".")[0]) + "." + layer.rpartition(".")[2]: row for layer, row in replayed.items()
    }
