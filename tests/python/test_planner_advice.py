"""What `poseidon plan` says: the verdict, the slowest ports, and where schemes stop paying."""

from __future__ import annotations

import pytest

pytest.importorskip("poseidon._core")

from poseidon.models import model_table
from poseidon.planner import ClusterSpec, Exchange, Planner, make_report


def test_the_verdict_names_the_limit_and_what_helps() -> None:
    slow = make_report(model_table("VGG19"), ClusterSpec(4, 1e9), Exchange(scheme="ps"))
    assert "The port is the limit" in slow.verdict
    assert "bf16 gives" in slow.verdict
    assert "10gbit gives" in slow.verdict
    fast = make_report(model_table("VGG19"), ClusterSpec(4, 1e11), Exchange())
    assert "Compute is the limit" in fast.verdict
    two = make_report(model_table("VGG19"), ClusterSpec(2, 1e8), Exchange(scheme="ps"))
    assert "One host alone is faster" in two.verdict
    many = make_report(model_table("VGG19"), ClusterSpec(1024, 1e11), Exchange())
    assert many.verdict.startswith("1024 hosts on 100gbit: 1")
    assert "e+" not in many.verdict


def test_the_least_rate_is_where_scaling_becomes_linear() -> None:
    table = model_table("VGG19")
    report = make_report(table, ClusterSpec(8, 1e10), Exchange())
    for words, exchange in (("these settings", Exchange()), ("every layer by ps", Exchange(scheme="ps"))):
        rate = report.least_bits_per_second[words]
        assert rate is not None
        assert Planner(table, ClusterSpec(8, rate * 1.01), exchange).predict().efficiency >= 0.95
        assert Planner(table, ClusterSpec(8, rate / 1.05), exchange).predict().efficiency < 0.95
    assert report.least_bits_per_second["every layer by ps"] > 2 * report.least_bits_per_second["these settings"]  # type: ignore[operator]


def test_scheme_limits_are_those_of_the_rule() -> None:
    """sfb has fewer bytes than ps while K P ≤ 2 M N/(M + N)."""
    report = make_report(model_table("VGG19"), ClusterSpec(8, 1e10), Exchange())
    (scheme, last), *_ = report.scheme_limits["fc7.weight"]
    assert scheme == "sfb"
    assert last <= 4096 / 32
    assert report.scheme_limits["fc7.weight"][-1][1] == 10_000


def test_smaller_clusters_keep_their_racks_and_servers() -> None:
    """8 of 9 hosts in 3 racks cannot be spread evenly: they are left out, and not put into one rack."""
    racks = make_report(model_table("AlexNet"), ClusterSpec(9, 1e9, racks=3, oversubscription=4.0), Exchange())
    assert [row.hosts for row in racks.scaling] == [1, 2, 4, 9]
    assert racks.scaling[2].step_s > racks.scaling[1].step_s, "two racks have an uplink between them"
    servers = make_report(model_table("AlexNet"), ClusterSpec(8, 1e9, servers=4), Exchange(scheme="ps"))
    assert [row.hosts for row in servers.scaling] == [1, 2, 4, 8]
    assert servers.scaling[-1].step_s == pytest.approx(servers.scaling[-2].step_s, rel=0.05)


def test_the_verdict_names_a_slow_worker() -> None:
    report = make_report(model_table("ResNet-50"), ClusterSpec(4, 1e10, slowest=1.5), Exchange())
    assert "The slowest worker is the limit." in report.verdict
    assert "no slow worker gives 4.0 x" in report.verdict
    assert [round(row.speedup, 2) for row in report.scaling] == [1.0, 1.33, 2.67]
    least = report.least_bits_per_second["these settings"]
    assert least is not None, "ports are asked for as if no worker were slow"
    assert least < 1e10
