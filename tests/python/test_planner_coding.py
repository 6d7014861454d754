"""Predictions with coding: when hosts code, and what then travels."""

from __future__ import annotations

import pytest

pytest.importorskip("poseidon._core", reason="the compiled core is not built")

from poseidon.models import model_table
from poseidon.planner import ClusterSpec, Exchange, Planner
from poseidon.planner.coded import codes

SLOW, FAST = ClusterSpec(8, 1e9), ClusterSpec(8, 4e10)


def port_bytes(model: str, cluster: ClusterSpec = SLOW, wire: str = "fp32", **changes: object) -> tuple[float, float]:
    """What a port moves in a step with coding, and without."""
    coded, plain = (
        Planner(model_table(model), cluster, Exchange("ps", wire, coding=coding, replayed=True, **changes)).predict()
        for coding in ("auto", "off")
    )
    return coded.port_bytes, plain.port_bytes


def test_hosts_code_where_a_core_keeps_up_with_the_port() -> None:
    auto = Exchange(coding="auto")
    rates = (1e9, 1e10, 2.5e10, 1e11)
    assert [codes(auto, ClusterSpec(8, rate)) for rate in rates] == [True, True, False, False]
    assert not codes(Exchange(wire="int8", coding="auto"), ClusterSpec(8, 1e10)), "which takes longer to code"
    assert codes(Exchange(coding="on"), FAST)
    assert not codes(Exchange(coding="off"), SLOW)
    assert not codes(auto, ClusterSpec(1, 1e9, workers_per_host=4)), "within a host nothing is coded"


@pytest.mark.parametrize(
    ("model", "wire", "share"),
    [
        ("ViT-B/16", "fp32", 27.35 / 32),
        ("ResNet-50", "fp32", 27.5 / 32),
        ("ViT-B/16", "bf16", 11.35 / 16),
        ("ViT-B/16", "int8", 7.55 / 8.125),
    ],
)
def test_bytes_are_those_of_the_sample(model: str, wire: str, share: float) -> None:
    coded, plain = port_bytes(model, wire=wire)
    assert coded / plain == pytest.approx(share, rel=0.01)


def test_rows_that_no_token_touches_take_next_to_nothing() -> None:
    table = model_table("Llama-134M")
    embedding = table.layers[0].parameter_count / table.parameter_count
    coded, plain = port_bytes("Llama-134M")
    assert coded / plain == pytest.approx(27.4 / 32 * (1 - embedding) + embedding * 0.1, rel=0.03)


def test_a_share_that_is_given_counts() -> None:
    coded, plain = port_bytes("ViT-B/16", coded_share=0.5)
    assert coded / plain == pytest.approx(0.5, rel=0.01)


def test_a_step_that_waits_for_its_port_is_shorter_and_fast_ports_change_nothing() -> None:
    table = model_table("GPT-2")
    steps = [
        [Planner(table, cluster, Exchange(coding=coding)).predict().step_s for coding in ("auto", "off")]
        for cluster in (SLOW, FAST)
    ]
    assert 0.8 < steps[0][0] / steps[0][1] < 0.95
    assert steps[1][0] == steps[1][1]


def test_both_simulations_agree() -> None:
    planner = Planner(model_table("ViT-B/16"), SLOW, Exchange(coding="auto"))
    assert planner.predict_by_message().step_s == pytest.approx(planner.predict().step_s, rel=0.02)


def test_workers_of_a_host_exchange_values_as_they_are() -> None:
    """With two of them the host's memory carries the same, coded or not, and the port less."""
    cluster = ClusterSpec(2, 1e9, workers_per_host=2, memory_bytes_per_s=1e6)
    table = model_table("ViT-B/16")
    steps = [Planner(table, cluster, Exchange("ps", coding=coding)).predict() for coding in ("auto", "off")]
    assert steps[0].busy_s == pytest.approx(steps[1].busy_s)
    assert steps[0].port_bytes < 0.9 * steps[1].port_bytes
