"""What the choice by time measures: rates of ports and processors, from records whose rates are known."""

from __future__ import annotations

import pytest

from poseidon import _core
from poseidon.adapter.choice.choices import ChoiceLog, LoggedChoice
from poseidon.adapter.choice.measurement import Processor, make_model
from poseidon.adapter.layer import SyncedLayer
from poseidon.adapter.layer_rules import LayerFacts, LayerRules, LayerWishes
from poseidon.adapter.stats import LayerSynchronization, StepRecord
from poseidon.errors import InvalidArgument

CLUSTER = _core.Cluster(4, 4, "colocated")
ROWS, COLS, FACTOR_COUNT = 100, 50, 10
PS_BYTES = 2 * ROWS * COLS * 4 * 3 / 4  # in one direction
SFB_BYTES = 3 * FACTOR_COUNT * (ROWS + COLS) * 4
CHOICES = dict.fromkeys(("first", "second"), ("ps", "sfb"))
MS = 1_000_000


def matrix(name: str, unit: int) -> SyncedLayer:
    facts = LayerFacts(name, "float32", ROWS * COLS, ROWS, gives_factors=True)
    layer = SyncedLayer(facts, LayerWishes(), LayerRules(small_bytes=0), (ROWS, COLS), fully_connected=True)
    layer.unit = (0, unit)
    return layer


LAYERS = [matrix("second", 0), matrix("first", 1)]


def exchange(
    name: str, scheme: str, ready: float, completed: float, compute: float = 0.0, started: float | None = None
) -> LayerSynchronization:
    """Times are ms since backward began, at 1000 ms, and lasted until 1020 ms."""

    def at(time: float) -> int:
        return int((1000 + time) * MS)

    begin = at(ready if started is None else started)
    return LayerSynchronization(
        name, scheme, 4 * FACTOR_COUNT, 0, 0, at(ready), begin, at(completed), int(compute * MS), at(0), at(20)
    )


def record(*layers: LayerSynchronization) -> StepRecord:
    return StepRecord(1000 * MS, 1020 * MS, list(layers))


def test_the_rate_of_a_port_is_that_while_it_is_busy() -> None:
    """Both exchanges overlap from 10 to 14 ms; the port is busy from 4 to 24 ms."""
    seen = record(exchange("second", "ps", 4, 14), exchange("first", "ps", 10, 24))
    model = make_model(LAYERS, CHOICES, [seen], 0.030, CLUSTER, Processor(1e9, 0.0))
    assert model is not None
    assert model.rates.link_bytes_per_s == pytest.approx(2 * PS_BYTES / 0.020)
    assert model.backward_s == pytest.approx(0.020)
    assert [unit.names for unit in model.units] == [("second",), ("first",)]
    assert model.units[0].demands["ps"].carried_bytes == PS_BYTES
    assert model.units[0].demands["sfb"].carried_bytes == SFB_BYTES
    assert model.units[0].demands["sfb"].multiply_adds == 4 * FACTOR_COUNT * ROWS * COLS
    assert model.predict(model.schemes).seconds == pytest.approx(0.030)
    assert model.predict(model.schemes).completed_s == pytest.approx((0.014, 0.024))


def test_gaps_latencies_and_products_do_not_lower_the_rate() -> None:
    first = exchange("first", "sfb", 20, 25, compute=2)
    seen = record(exchange("second", "ps", 0, 11), first)
    model = make_model(LAYERS, CHOICES, [seen], 0.030, CLUSTER, Processor(5.0, 0.001))
    assert model is not None
    # 10 ms for the first and 2 ms for the second, each after a latency of 1 ms, and the products after that.
    assert model.rates.link_bytes_per_s == pytest.approx((PS_BYTES + SFB_BYTES) / 0.012)
    assert model.rates.multiply_adds_per_s == pytest.approx(4 * FACTOR_COUNT * ROWS * COLS / 0.002)


def test_products_that_wait_for_each_other_count_once() -> None:
    """The second's product waits from 8 to 12 ms for the first's."""
    seen = record(exchange("second", "sfb", 0, 12, compute=8), exchange("first", "sfb", 0, 16, compute=8))
    model = make_model(LAYERS, CHOICES, [seen], 0.030, CLUSTER, Processor(5.0, 0.0))
    assert model is not None
    assert model.rates.multiply_adds_per_s == pytest.approx(2 * 4 * FACTOR_COUNT * ROWS * COLS / 0.012)


def test_what_has_no_products_takes_the_rate_of_the_processor() -> None:
    seen = record(exchange("second", "ps", 0, 10))
    model = make_model(LAYERS, CHOICES, [seen], 0.030, CLUSTER, Processor(7e6, 0.0))
    assert model is not None
    assert model.rates.multiply_adds_per_s == 7e6


def test_a_group_is_one_unit_which_starts_with_its_last_member() -> None:
    members = [matrix("first", 7), matrix("second", 7)]
    seen = record(exchange("second", "ps", 2, 14), exchange("first", "ps", 4, 14))
    model = make_model(members, {}, [seen], 0.030, CLUSTER, Processor(1e9, 0.0))
    assert model is not None
    assert [unit.names for unit in model.units] == [("second", "first")]
    assert model.rates.link_bytes_per_s == pytest.approx(2 * PS_BYTES / 0.010)
    assert list(model.units[0].demands) == ["ps"], "it has no choice"


def test_a_step_that_sends_nothing_has_no_model() -> None:
    assert make_model(LAYERS, CHOICES, [record()], 0.030, CLUSTER, Processor(1e9, 0.0)) is None
    assert make_model(LAYERS, CHOICES, [], 0.030, CLUSTER, Processor(1e9, 0.0)) is None


def test_a_dense_gradient_without_factors_has_no_choice() -> None:
    unknown = LayerSynchronization("second", "ps", 2**32 - 1, 0, 0, 1000 * MS, 1000 * MS, 1010 * MS, 0, 0, 1)
    model = make_model(LAYERS, CHOICES, [record(unknown)], 0.030, CLUSTER, Processor(1e9, 0.0))
    assert model is not None
    assert list(model.units[0].demands) == ["ps"]


def test_the_log_has_the_choices_in_force() -> None:
    log = ChoiceLog([LoggedChoice(3, "a", "ps", 4), LoggedChoice(5, "a", "sfb", 4), LoggedChoice(5, "b", "ps", 9)])
    assert (len(log), log.last_step, ChoiceLog().last_step) == (3, 5, -1)
    assert log.in_force(2) == {}
    assert {name: choice.scheme for name, choice in log.in_force(4).items()} == {"a": "ps"}
    assert {name: choice.scheme for name, choice in log.in_force(5).items()} == {"a": "sfb", "b": "ps"}
    assert [choice.layer for choice in log.at(5)] == ["a", "b"]
    assert ChoiceLog.of(log.plain(), {"a": ("ps", "sfb"), "b": ("ps",)}).plain() == log.plain()
    with pytest.raises(InvalidArgument, match="'b' takes scheme 'ps'"):
        ChoiceLog.of(log.plain(), {"a": ("ps", "sfb")})
    for wrong in (None, 3, [{"step": 1}], [{**log.plain()[0], "step": 1.5}], [{**log.plain()[0], "more": 1}]):
        with pytest.raises(InvalidArgument, match="no log of choices"):
            ChoiceLog.of(wrong)
