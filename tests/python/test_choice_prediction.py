"""The prediction of a step, and the decisions that follow from it: against hand-made steps and exhaustive search."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from poseidon.adapter.choice.decision import Decider, best_schemes
from poseidon.adapter.choice.measurement import noise_s
from poseidon.adapter.choice.prediction import Demand, Rates, StepModel, UnitWork, fitted

RATES = Rates(link_bytes_per_s=100.0, latency_s=0.0, multiply_adds_per_s=10.0)


def unit(
    name: str, ready: float, place: int = 0, *, at_use: bool = False, backward: float = 1.0, **demands: Demand
) -> UnitWork:
    return UnitWork((name,), ready, backward, place, at_use, next(iter(demands)), demands)


def test_a_port_carries_one_unit_after_another_and_backward_hides_it() -> None:
    dense = Demand(100.0, 2, 0.0)  # a second on the port
    units = [unit("last", 1.0, ps=dense), unit("first", 1.5, ps=dense)]
    assert StepModel(units, RATES, 4.0, 0.0).predict(("ps", "ps")).completed_s == (2.0, 3.0)
    assert StepModel(units, RATES, 4.0, 0.5).predict(("ps", "ps")).seconds == 4.5, "hidden behind backward"
    assert StepModel(units, RATES, 1.5, 0.5).predict(("ps", "ps")).seconds == 3.5
    slow = replace(RATES, latency_s=0.1)
    assert StepModel(units, slow, 1.5, 0.0).predict(("ps", "ps")).seconds == pytest.approx(3.2), "two hops"


def test_products_run_one_after_another_when_parts_have_arrived() -> None:
    factors = Demand(10.0, 1, 20.0)  # a tenth of a second on the port, two of products
    units = [unit("last", 0.0, sfb=factors), unit("first", 0.0, sfb=factors)]
    assert StepModel(units, RATES, 0.0, 0.0).predict(("sfb", "sfb")).completed_s == (2.1, 4.1)
    elsewhere = replace(RATES, multiply_adds_per_s=float("inf"))
    assert StepModel(units, elsewhere, 0.0, 0.0).predict(("sfb", "sfb")).completed_s == pytest.approx((0.1, 0.2))


def test_products_on_the_accelerator_delay_its_layers() -> None:
    factors, dense = Demand(10.0, 1, 10.0), Demand(100.0, 2, 0.0)  # products, and the port of dense ones, take a second
    units = [unit("last", 1.0, 1, sfb=factors), unit("first", 3.0, 0, ps=dense)]
    beside = StepModel(units, RATES, 3.0, 1.0)
    assert beside.predict(("sfb", "ps")).completed_s == (2.1, 4.0)
    between = replace(beside, products_on_accelerator=True)
    # The factors are there at 1.1, while the first layer computes. Their product comes after that.
    assert between.predict(("sfb", "ps")).completed_s == (4.0, 4.0)
    assert between.predict(("sfb", "ps")).seconds == 5.0
    three = [units[0], unit("middle", 2.0, 1, ps=Demand(0.0, 2, 0.0)), units[1]]
    later = StepModel(three, RATES, 3.0, 1.0, products_on_accelerator=True).predict(("sfb", "ps", "ps"))
    assert later.completed_s[0] == 3.0, "between two layers"
    assert later.completed_s[2] == 5.0, "the first layer's gradient exists a second later"


def test_what_forward_uses_first_stops_other_units() -> None:
    dense = Demand(100.0, 2, 0.0)
    units = [unit("last", 0.0, 1, at_use=True, ps=dense), unit("first", 0.5, 0, at_use=True, ps=dense)]
    model = StepModel(units, RATES, 0.5, 1.0)
    assert model.predict(("ps", "ps")).completed_s == (2.0, 1.5)
    assert model.predict(("ps", "ps")).seconds == 2.5, "the first layer runs from 1.5 to 2.0, when the last is there"
    waits = [replace(one, awaited_at_use=False) for one in units]
    assert StepModel(waits, RATES, 0.5, 1.0).predict(("ps", "ps")).seconds == 3.0


def test_the_rest_of_a_step_is_what_its_exchanges_do_not_explain() -> None:
    units = [unit("only", 1.0, ps=Demand(100.0, 2, 0.0))]
    assert fitted(units, RATES, 1.0, 3.0).rest_s == pytest.approx(1.0)
    assert fitted(units, RATES, 1.0, 1.5).rest_s == pytest.approx(0.0), "the exchange alone takes longer"
    at_use = [replace(one, awaited_at_use=True) for one in units]
    assert fitted(at_use, RATES, 1.0, 2.5).rest_s == pytest.approx(0.5)


def random_model(seed: int) -> StepModel:
    draw = random.Random(seed)
    ready, units = 0.0, []
    for index in range(draw.randint(1, 5)):
        backward = draw.uniform(0, 2)
        ready += backward
        schemes = {"ps": Demand(draw.uniform(1, 400), 2, 0.0)}
        if draw.random() < 0.8:
            schemes["sfb"] = Demand(draw.uniform(1, 400), 1, draw.uniform(0, 40))
        if draw.random() < 0.3:
            schemes["third"] = Demand(draw.uniform(1, 400), 2, draw.uniform(0, 20))
        at_use = draw.random() < 0.5
        units.append(unit(f"layer{index}", ready, 10 - index, at_use=at_use, backward=backward, **schemes))
    rates = Rates(draw.uniform(50, 500), draw.uniform(0, 0.1), draw.uniform(5, 50))
    return StepModel(units, rates, ready, draw.uniform(0, 3))


def test_the_decision_is_that_of_an_exhaustive_search() -> None:
    worse = []
    for seed in range(300):
        model = random_model(seed)
        all_of_them = itertools.product(*(one.demands for one in model.units))
        least = min(model.predict(schemes).seconds for schemes in all_of_them)
        found = model.predict(best_schemes(model)).seconds
        assert found >= least - 1e-9
        worse.append(found / least - 1)
    assert max(worse) < 0.02, "a local minimum costs less than 2 %"
    assert sum(one > 1e-9 for one in worse) < 15, "and it is rare"


def test_equal_predictions_change_nothing() -> None:
    hidden = unit("hidden", 0.0, ps=Demand(100.0, 2, 0.0), sfb=Demand(50.0, 1, 0.0))
    assert best_schemes(StepModel([hidden], RATES, 9.0, 0.0)) == ("ps",)


STEADY = [3.0] * 6


def test_a_gain_below_the_noise_is_no_reason() -> None:
    def model(sfb_bytes: float) -> StepModel:
        both = {"ps": Demand(200.0, 2, 0.0), "sfb": Demand(sfb_bytes, 1, 0.0)}
        return fitted([unit("fc", 1.0, **both)], RATES, 1.0, 3.0)

    assert Decider().consider(model(196.0), STEADY) is None, "1.3 % of the step"
    decision = Decider().consider(model(100.0), STEADY)
    assert decision is not None
    assert decision.schemes == {"fc": "sfb"}
    assert decision.predicted_s == pytest.approx(2.0)
    assert not decision.taken_back
    varying = [2.0, 4.0, 2.0, 4.0, 3.0, 3.0, 1.0, 5.0]
    assert noise_s(varying) > 1.0
    assert Decider().consider(model(100.0), varying) is None


def test_a_change_that_does_not_help_is_taken_back_and_not_repeated() -> None:
    def model(scheme: str, link: float = 100.0) -> StepModel:
        both = {"ps": Demand(200.0, 2, 0.0), "sfb": Demand(100.0, 1, 0.0)}
        now = replace(unit("fc", 1.0, **both), scheme=scheme)
        return fitted([now], replace(RATES, link_bytes_per_s=link), 1.0, 3.0)

    decider = Decider()
    first = decider.consider(model("ps"), STEADY)
    assert first is not None
    assert first.schemes == {"fc": "sfb"}
    back = decider.consider(model("sfb"), [3.1] * 6)
    assert back is not None
    assert back.taken_back
    assert back.schemes == {"fc": "ps"}
    for _ in range(3):
        assert decider.consider(model("ps"), STEADY) is None, "the cluster is the same"
    again = decider.consider(model("ps", link=50.0), STEADY)
    assert again is not None, "a port has become slower"
    assert again.schemes == {"fc": "sfb"}
    assert decider.consider(model("sfb", link=50.0), [2.0] * 6) is None, "it has helped"
