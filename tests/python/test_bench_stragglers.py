"""The benchmark of slow workers runs end to end on a small input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "stragglers.py"


def test_slow_workers_are_measured_and_judged() -> None:
    pytest.importorskip("poseidon._core")
    pytest.importorskip("sklearn")
    small = ["--ranks", "3", "--steps", "14", "--step-ms", "1", "--slow", "40", "--hidden", "16", "--dataset", "digits"]
    command = [sys.executable, str(SCRIPT), *small, "--target", "0.1", "--json"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert answer.stdout, answer.stderr
    document = json.loads(answer.stdout)
    runs = {(run["case"], run["way"]): run for run in document["runs"]}
    assert len(runs) == 14
    assert all(run["equal_replicas"] for run in runs.values())
    assert all(run["step_ms"] > 1 and run["accuracy"] > 0.1 for run in runs.values())
    assert runs["persistent", "drop"]["dropped"][2] > 0
    assert runs["persistent", "drop, catching up"]["batches"][2] < 14
    assert answer.returncode == (0 if all(bar["met"] for bar in document["bars"]) else 1)
