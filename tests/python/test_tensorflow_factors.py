"""Factors of TensorFlow's kernels, of which each step finds out how many there are: `tensorflow_factors.py` on all
ranks."""

from __future__ import annotations

from typing import Any

import pytest

import workers
from tensorflow_jobs import answers

pytest.importorskip("poseidon._core", reason="the compiled core is not built")
pytest.importorskip("tensorflow")

FACTORS = workers.__file__.replace("workers.py", "tensorflow_factors.py")
NO_FACTORS = "its gradient is no sum of factors"


@pytest.fixture(scope="module")
def four() -> dict[str, Any]:
    """What all of four ranks have answered alike."""
    found = answers(4, "learnt", "unequal", "positions", "used_besides", script=FACTORS)
    assert found[1:] == found[:-1]
    return found[0]


@pytest.fixture(scope="module")
def two() -> dict[str, Any]:
    """The same of two ranks."""
    found = answers(2, "changed", "one_has_none", "never", script=FACTORS)
    assert found[1] == found[0]
    return found[0]


def test_fit_learns_how_many_factors_there_are_in_its_first_step_and_whenever_batches_change(
    four: dict[str, Any],
) -> None:
    found = four["learnt"]
    assert found["seen 1"] == [
        [["ps", 32], ["sfb", 32], ["sfb", 32], ["sfb", 16]],
        [["sfb", 4096], ["ps", 4096]],
        [["ps", 32], ["sfb", 32]],
    ]
    scheme, count, reason = found["plan 1"]
    assert (scheme, count) == ("sfb", 8)
    assert reason.startswith("bytes per node: sfb ")


def test_several_steps_in_one_call_choose_as_single_ones(four: dict[str, Any]) -> None:
    found = four["learnt"]
    assert found["seen 3"] == [[["sfb", 32], ["sfb", 16]], [["ps", 4096]], [["sfb", 32]]]
    assert found["digest 3"] == found["digest 1"]


def test_ranks_with_other_numbers_of_rows_choose_by_their_mean(four: dict[str, Any]) -> None:
    assert four["unequal"]["seen"] == [["sfb", 26], ["sfb", 42], ["sfb", 26], ["sfb", 74]]


def test_rows_of_all_positions_count(four: dict[str, Any]) -> None:
    assert four["positions"]["seen"] == [["sfb", 160], ["sfb", 160], ["sfb", 160]]


def test_a_gradient_that_the_program_uses_besides_and_applies_in_a_branch(four: dict[str, Any]) -> None:
    found = four["used_besides"]
    assert [scheme for scheme, _ in found["seen"]] == ["sfb"] * 3
    assert found["equal norms"]


def test_a_rank_whose_gradient_is_no_product_any_more_sends_it_whole(two: dict[str, Any]) -> None:
    assert [scheme for scheme, _ in two["changed"]["seen"]] == ["sfb", "sfb", "sfb", "ps", "ps"]


def test_a_kernel_that_has_factors_on_one_rank_only_sends_none_on_any(two: dict[str, Any]) -> None:
    found = two["one_has_none"]
    assert [scheme for scheme, _ in found["seen"]] == ["ps"] * 3
    assert found["plan"] == ["ps", None, NO_FACTORS]


def test_eager_steps_and_gradients_that_were_cast_have_no_factors(two: dict[str, Any]) -> None:
    assert [plan for plan, _ in two["never"]] == [["ps", None, NO_FACTORS]] * 2


def test_a_rank_without_a_compiler_makes_all_send_whole_gradients() -> None:
    first, second = answers(2, "one_without_compiler", script=FACTORS)
    assert first == second
    assert first["one_without_compiler"]["plan"] == ["ps", None, NO_FACTORS]


@pytest.mark.parametrize(("wire", "factor_wire"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_factors_travel_in_a_format_of_their_own(wire: str, factor_wire: str) -> None:
    found = answers(2, "rounded", script=FACTORS, POSEIDON_WIRE=wire, POSEIDON_FACTOR_WIRE=factor_wire)
    for answer in found:
        one = answer["rounded"]
        assert one["seen"] == "sfb"
        assert (one["large"] > 2e-4) == (factor_wire == "bf16"), one
        assert (one["other"] > 2e-4) == (wire == "bf16"), one
