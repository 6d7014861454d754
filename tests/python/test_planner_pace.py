"""Simulated steps of workers that differ in speed, against measured ones, and what cannot be simulated."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

pytest.importorskip("poseidon._core")

from poseidon import _core
from poseidon.errors import InvalidArgument
from poseidon.planner import Pace, simulate_pace
from poseidon.planner.pace import time_lost

CLI = [sys.executable, "-m", "poseidon", "simulate", "ResNet-50", "--hosts", "4", "--link", "10gbit"]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "stragglers.md"
ROW = re.compile(r"^\| (\w+) \| ([\w, ]+) \| ([\d.]+) \| ([\d.]+) \| .* \| (\d+) % \| 0 % \|$", re.M)
# Of the page's runs: what a step computes, and what it takes longer beside others. 4 x 30 ms is what a slow step
# sleeps more.
COMPUTE_S, EXCHANGE_S, SLOW_S = 0.0335, 0.0062, 0.12
WAYS = {
    "wait": {},
    "drop": {"stragglers": "drop"},
    "drop, catching up": {"stragglers": "drop", "catches_up": True},
    "ssp": {"consistency": "ssp"},
    "async": {"consistency": "async"},
}


def measured() -> Iterator[tuple[str, str, float, float, float]]:
    for case, way, step_ms, done_ms, dropped in ROW.findall(PAGE.read_text(encoding="utf-8")):
        if case in ("transient", "persistent"):
            yield case, way, float(step_ms), float(done_ms), float(dropped) / 100


def test_measured_steps_beside_a_slow_worker_are_predicted() -> None:
    errors, rows = [], list(measured())
    assert len(rows) == 10
    for case, way, step_ms, done_ms, dropped in rows:
        share = 0.1 if case == "transient" else 1.0
        pace = Pace(slow=(COMPUTE_S + SLOW_S) / COMPUTE_S, slow_share=share, **WAYS[way])  # type: ignore[arg-type]
        found = simulate_pace(pace, 4, COMPUTE_S, EXCHANGE_S)
        errors += [1e3 * found.step_s / step_ms - 1, 1e3 * found.all_done_s / done_ms - 1]
        assert 1 - found.counted == pytest.approx(dropped, abs=0.15), (case, way)
    sizes = [abs(error) for error in errors]
    assert median(sizes) <= 0.04
    assert max(sizes) <= 0.10


@pytest.mark.parametrize("way", WAYS)
def test_equal_workers_take_a_step_of_all(way: str) -> None:
    found = simulate_pace(Pace(**WAYS[way]), 8, 1.0, 0.2)  # type: ignore[arg-type]
    alone = way in ("ssp", "async")
    assert found.step_s == pytest.approx(1.1 if alone else 1.2)
    assert (found.counted, found.others_weight, found.computed) == (1, 1, 1)


def test_dropping_costs_the_weight_of_examples() -> None:
    always = simulate_pace(Pace(slow=4.0, stragglers="drop", catches_up=True, steps=1000), 8, 1.0, 0.1)
    assert always.counted == pytest.approx(0.01)  # the steps in which the servers learn
    assert always.others_weight == pytest.approx(8 / 7, rel=0.01)
    assert always.step_s < 1.2
    waits = simulate_pace(Pace(slow=4.0, steps=1000), 8, 1.0, 0.1)
    assert waits.step_s == pytest.approx(4.1)
    assert waits.counted == 1


def test_two_workers_never_drop_each_other() -> None:
    found = simulate_pace(Pace(slow=3.0, stragglers="drop"), 2, 1.0, 0.0)
    assert found.counted == 1
    assert found.step_s == pytest.approx(3.0)


def test_staleness_bounds_the_age_of_parameters() -> None:
    ages = [simulate_pace(Pace(slow=3.0, consistency="ssp", staleness=bound), 4, 1.0, 0.1).age for bound in (0, 2, 6)]
    assert [most for _, most in ages] == sorted(most for _, most in ages)
    assert ages[0][1] <= 1
    assert simulate_pace(Pace(slow=3.0, consistency="ssp", staleness=0), 4, 1.0, 0.0).step_s == pytest.approx(3.0)


def test_failures_take_the_time_that_they_take() -> None:
    every_h, lost = time_lost(mtbf_h=100, workers=50, step_s=2.0, rejoin_s=9.0)
    assert every_h == 2
    assert lost == pytest.approx(10 / 7210)
    for mtbf, rejoin in ((0.0, 5.0), (-1.0, 5.0), (float("inf"), 5.0), (10.0, -1.0)):
        with pytest.raises(InvalidArgument, match="must be above 0"):
            time_lost(mtbf, 4, 1.0, rejoin)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"slow": 0.5}, "slow is 0.5: it must be 1 or more"),
        ({"slow_share": 2.0}, "slow-share is 2: it must be from 0 to 1"),
        ({"jitter": -1.0}, "jitter is -1"),
        ({"stragglers": "late"}, "stragglers is late: give wait or drop"),
        ({"consistency": "none"}, "consistency is none"),
        ({"stragglers": "drop", "consistency": "ssp"}, "exclude each other"),
        ({"catches_up": True}, "catching up is for stragglers=drop"),
        ({"steps": 0}, "steps is 0: give 1 to 100000"),
        ({"straggler_steps": 0}, "straggler-steps is 0"),
        ({"staleness": -1}, "staleness is -1"),
    ],
)
def test_what_cannot_be_is_told(options: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(words)):
        Pace(**options)  # type: ignore[arg-type]


def test_the_rule_of_the_servers_takes_one_arrival_for_each_worker() -> None:
    rule = _core.DropRule(3, 3.0)
    assert rule.end_step([1, 2, 3], 0) == 3
    with pytest.raises(ValueError, match="one arrival for each worker"):
        rule.end_step([1, 2], 0)
    with pytest.raises(ValueError, match="no workers"):
        _core.DropRule(0, 3.0)


def test_the_command_says_what_a_slow_worker_costs() -> None:
    drop = [*CLI, "--slow", "3", "--slow-share", "0.1", "--stragglers", "drop", "--catches-up", "--mtbf", "500"]
    told = subprocess.run(drop, check=True, capture_output=True, text=True).stdout
    assert "The slow worker's gradients are in " in told
    assert "A worker fails every 125 hours" in told
    answer = json.loads(subprocess.run([*drop, "--json"], check=True, capture_output=True, text=True).stdout)
    assert 0 < answer["steps"]["counted"] < 1
    assert answer["failures"]["every_h"] == 125
    stale = [*CLI, "--slow", "3", "--consistency", "async"]
    assert "lack" in subprocess.run(stale, check=True, capture_output=True, text=True).stdout
    refused = subprocess.run([*CLI, "--stragglers", "drop", "--scheme", "sfb"], capture_output=True, text=True)
    assert refused.returncode == 1
    assert "every worker waits for all others" in refused.stderr
