"""The reliability benchmarks on small inputs: a short soak, its checks, and a detection."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

from fault_job import Event  # noqa: E402
from soak import Recovered, SoakResult, document, parse_arguments, spread  # noqa: E402


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)


@pytest.mark.parametrize(("on_failure", "ranks"), [("rejoin", 3), ("shrink", 2)])
def test_a_short_soak_has_no_hang_and_no_wrong_bit(on_failure: str, ranks: int) -> None:
    faults = ["--minutes", "0.05", "--every", "1", "--faults", "kill,term", "--timeout", "60"]
    answer = run_script("soak.py", "--ranks", str(ranks), "--on-failure", on_failure, *faults, "--json")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    result = json.loads(answer.stdout)
    assert result["problems"] == []
    assert sum(result["faults"].values()) >= 1
    assert result["recoveries_from_ended"]["count"] >= 1
    assert result["steps"] > 20
    if on_failure == "rejoin":
        assert result["compared"] == result["digests"] >= 2


def digest(slot: int, step: int, value: str) -> Event:
    return Event(slot, 100 + slot, "digest", 0.0, {"step": step, "value": value})


def test_a_soak_tells_states_apart() -> None:
    result, undisturbed = SoakResult(), SoakResult(digests={20: "aa", 40: "bb"})
    result.note_digest(digest(0, 20, "aa"))
    result.note_digest(digest(1, 20, "aa"))
    result.note_digest(digest(0, 40, "cc"))
    assert result.problems == []
    result.note_digest(digest(1, 40, "bb"))
    assert "slot 1" in result.problems[0]
    result.compare(undisturbed)
    assert result.compared == 2
    assert "step 40" in result.problems[1]


def test_a_soak_that_compared_nothing_says_so() -> None:
    result = SoakResult(digests={20: "aa"})
    result.compare(SoakResult(digests={40: "aa"}))
    assert "nothing" in result.problems[0]


def test_recovery_times_are_reported_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["soak.py", "--minutes", "1", "--seed", "7"])
    config, as_json = parse_arguments()
    assert (config.seconds, config.seed, as_json) == (60, 7, False)
    slow = Recovered(9.0, ["kill", "freeze"])
    result = SoakResult(Counter(kill=3, freeze=1), [Recovered(float(n), ["kill"]) for n in (1, 2, 3)] + [slow])
    facts = document(config, result)
    assert facts["recoveries_from_ended"] == {"count": 3, "median": 2.0, "95%": 3.0, "max": 3.0}
    assert facts["recoveries_from_frozen"] == {"count": 1, "median": 9.0, "95%": 9.0, "max": 9.0}
    assert spread([]) == {"count": 0}


def test_a_killed_worker_is_noticed_within_a_second() -> None:
    answer = run_script("reliability.py", "--only", "kill", "--ranks", "3", "--repeats", "1")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    lines = answer.stdout.splitlines()
    assert len(lines) == 4
    assert all(line.endswith("met") for line in lines)
