"""The reliability benchmarks on small inputs: short soaks, their checks, and a detection."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

from faults.job import Event, FaultJob  # noqa: E402
from faults.soak_config import SoakConfig  # noqa: E402
from faults.soak_result import Recovered, SoakResult, document, spread  # noqa: E402
from soak import Soak, parse_arguments  # noqa: E402


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)


def short_soak(*arguments: str) -> dict[str, Any]:
    """The result of one that found no problem."""
    faults = ["--minutes", "0.05", "--every", "1", "--faults", "kill,term", "--timeout", "60"]
    answer = run_script("soak.py", *faults, *arguments, "--json")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    result: dict[str, Any] = json.loads(answer.stdout)
    assert result["problems"] == []
    assert result["recoveries_from_ended"]["count"] >= 1
    assert result["steps"] > 20
    return result


@pytest.mark.parametrize(("on_failure", "ranks"), [("rejoin", 3), ("shrink", 2)])
def test_a_short_soak_has_no_hang_and_no_wrong_bit(on_failure: str, ranks: int) -> None:
    result = short_soak("--ranks", str(ranks), "--on-failure", on_failure)
    assert set(result["faults"]) <= {"kill", "term"}
    assert sum(result["faults"].values()) >= 1
    if on_failure == "rejoin":
        assert result["compared"] == result["digests"] >= 2


def test_a_short_soak_of_servers_that_stand_alone() -> None:
    """The seed strikes one of them first."""
    result = short_soak("--ranks", "2", "--servers", "2", "--optimizer", "server", "--seed", "1")
    assert result["faults"].keys() & {"kill server", "term server"}
    assert result["compared"] == result["digests"] >= 2


def test_steps_count_as_recovered_when_the_servers_are_back(tmp_path: Path) -> None:
    """One that is committed while a server is gone had its results before."""
    job = FaultJob(1, [], {}, servers=1)
    job.current = {slot: SimpleNamespace(slot=slot, pid=100 + slot, frozen=False) for slot in range(2)}  # type: ignore
    soak = Soak(SoakConfig(60.0, ranks=1, servers=1), job, tmp_path / "steps")

    def committed(at: float) -> Event:
        return Event(0, 100, "committed", at, {"step": 1, "world_size": 1, "loss": 1.0})

    def is_over() -> bool:
        return soak.incident is None

    soak.note(committed(1.0))
    assert not is_over(), "the server does not listen yet"
    soak.note(Event(1, 101, "serving", 3.0))
    soak.note(committed(2.0))
    assert not is_over(), "it was before the server was there"
    soak.note(committed(4.0))
    assert is_over()


def digest(slot: int, step: int, value: str, generation: int = 1) -> Event:
    data = {"step": step, "generation": generation, "value": value, "memory_bytes": 1000 + step}
    return Event(slot, 100 + slot, "digest", float(step), data)


def test_a_soak_tells_how_memory_grows() -> None:
    result = SoakResult()
    assert result.growth_per_hour() is None
    for step in range(0, 200, 20):  # a byte a second
        result.note_digest(digest(0, step, "aa"), "rejoin")
    result.note_digest(digest(1, 0, "aa"), "rejoin")
    assert result.growth_per_hour() == pytest.approx(3600)


def test_a_soak_tells_states_apart() -> None:
    result, undisturbed = SoakResult(), SoakResult(digests={20: "aa", 40: "bb"})
    result.note_digest(digest(0, 20, "aa"), "rejoin")
    result.note_digest(digest(1, 20, "aa", generation=2), "rejoin")
    result.note_digest(digest(0, 40, "cc"), "rejoin")
    assert result.problems == []
    result.note_digest(digest(1, 40, "bb", generation=2), "rejoin")
    assert "slot 1" in result.problems[0]
    result.compare(undisturbed)
    assert result.compared == 2
    assert "step 40" in result.problems[1]


def test_with_shrink_others_may_make_a_step_again() -> None:
    result = SoakResult()
    result.note_digest(digest(0, 20, "aa"), "shrink")
    result.note_digest(digest(0, 20, "bb", generation=2), "shrink")
    assert result.problems == []
    result.note_digest(digest(1, 20, "aa", generation=2), "shrink")
    assert "slot 1" in result.problems[0]


def test_a_soak_that_compared_nothing_says_so() -> None:
    result = SoakResult(digests={20: "aa"})
    result.compare(SoakResult(digests={40: "aa"}))
    assert "nothing" in result.problems[0]


def test_recovery_times_are_reported_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["soak.py", "--minutes", "1", "--servers", "2", "--seed", "7"])
    config, as_json = parse_arguments()
    assert (config.seconds, config.servers, config.seed, as_json) == (60, 2, 7, False)
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
