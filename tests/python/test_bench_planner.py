"""Predicted steps against the measured ones of docs/benchmarks.md."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("poseidon._core")

BENCH = Path(__file__).resolve().parents[2] / "bench"


def test_documented_steps_are_predicted() -> None:
    command = [sys.executable, str(BENCH / "planner.py"), "--documented", "--json"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert answer.returncode == 0, answer.stderr
    result = json.loads(answer.stdout)
    assert len(result["cells"]) >= 17
    assert result["median_error"] <= 0.03
    assert result["worst_error"] <= 0.08
