"""Predicted steps against the measured ones of docs/benchmarks.md, and simulated ones of hundreds of workers."""

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
    assert len(result["cells"]) >= 14
    assert result["median_error"] <= 0.03
    assert result["worst_error"] <= 0.08


def test_the_choice_is_never_slower_than_one_scheme_for_all() -> None:
    command = [sys.executable, str(BENCH / "schemes_at_scale.py")]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert answer.returncode == 0, answer.stderr
    rows = [line.strip("| ").split(" | ") for line in answer.stdout.splitlines()[2:]]
    assert len(rows) == 24
    assert all(float(auto) <= min(float(ps), float(sfb)) for _, _, _, _, ps, sfb, auto, *_ in rows)
    assert all(gain == best for *_, gain, best, _ in rows), "no other choice is faster"
    page = (BENCH.parent / "docs" / "planning.md").read_text(encoding="utf-8")
    assert answer.stdout in page, "run it again and put its table into the page"
