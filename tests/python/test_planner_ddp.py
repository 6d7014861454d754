"""The predicted step of torch's DDP: against its closed form, against measured ones, and where it is shown."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

pytest.importorskip("poseidon._core")

from poseidon.bench.suite import cells as suite_cells
from poseidon.bench.suite.grid import SCALE
from poseidon.models import model_table, scaled
from poseidon.planner import ClusterSpec
from poseidon.planner.ddp import ddp_step_s
from poseidon.testbed.shaping import ETHERNET_HEADER_BYTES

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "suite"
FOUR = ClusterSpec(hosts=4, bits_per_second=1e9, latency_s=0.0)


def test_one_worker_computes_and_exchanges_nothing() -> None:
    table = model_table("ResNet-50")
    assert ddp_step_s(table, ClusterSpec(hosts=1, bits_per_second=1e9)) == pytest.approx(table.iteration_seconds)


def test_on_a_slow_port_all_bytes_pass_after_the_first_bucket() -> None:
    table = model_table("VGG19")
    slow = replace(FOUR, bits_per_second=1e7)
    passed_s = 2 * 3 / 4 * 4 * table.parameter_count / slow.payload_bytes_per_s
    step_s = ddp_step_s(table, slow)
    assert passed_s < step_s < passed_s + table.iteration_seconds
    halves = ddp_step_s(table, slow, number_bytes=2)
    assert halves == pytest.approx(step_s / 2, rel=0.01)


def test_on_a_fast_port_only_the_last_bucket_is_seen() -> None:
    table = model_table("ResNet-50")
    fast = replace(FOUR, bits_per_second=1e11)
    last_s = 2 * 3 / 4 * (26 << 20) / fast.payload_bytes_per_s
    assert table.iteration_seconds < ddp_step_s(table, fast) < table.iteration_seconds + last_s


def test_it_waits_for_the_slowest_worker_and_for_an_uplink() -> None:
    table = model_table("ResNet-50")
    slow = ddp_step_s(table, replace(FOUR, bits_per_second=1e12, slowest=2.0))
    assert slow == pytest.approx(2 * table.iteration_seconds, rel=0.01)
    racks = replace(FOUR, hosts=8, racks=2)
    assert ddp_step_s(table, racks) == pytest.approx(ddp_step_s(table, replace(racks, racks=1)))
    narrow = replace(racks, oversubscription=16.0)
    assert ddp_step_s(table, narrow) > 2 * ddp_step_s(table, racks)


def test_it_is_what_the_suite_has_measured() -> None:
    found = suite_cells.latest(suite_cells.load(RESULTS))
    errors = []
    for (group, method), cell in found.items():
        if method != "ddp":
            continue
        table = replace(scaled(model_table(cell.model), SCALE), iteration_seconds=found[group, "none"].step_s)
        rate = cell.gbit_per_s * 1e9 / SCALE**2 / cell.stretch
        cluster = ClusterSpec(cell.hosts, rate, frame_bytes=ETHERNET_HEADER_BYTES)
        errors.append(abs(ddp_step_s(table, cluster, scale=SCALE) / cell.step_s - 1))
    assert len(errors) >= 16
    assert median(errors) < 0.05
    assert max(errors) < 0.15


def test_a_plan_says_it() -> None:
    command = [sys.executable, "-m", "poseidon", "plan", "VGG19", "--hosts", "4", "--link", "1gbit"]
    words = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "torch's DDP over Gloo: 7.8" in words
    found = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)
    assert found["ddp_step_s"] == pytest.approx(7.84, rel=0.01)
    alone = [*command[:5], "--hosts", "1", "--link", "1gbit"]
    assert "Gloo" not in subprocess.run(alone, capture_output=True, text=True, check=True).stdout
