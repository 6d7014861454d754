"""The benchmark scripts run end to end on small inputs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import forked

BENCH = Path(__file__).resolve().parents[2] / "bench"


def run_script(name: str, *arguments: str) -> Any:
    command = [str(BENCH / name), *arguments, "--json"]
    with tempfile.TemporaryDirectory() as folder:
        (output,) = forked.run_script(command, [dict(os.environ)], Path(folder), timeout_s=120)
    document = re.search(r"^[\[{][\s\S]*", output, re.MULTILINE)  # after what torch says
    assert document, output
    return json.loads(document[0])


@cache
def converged() -> Any:
    """How Poseidon and DDP came to the target."""
    pytest.importorskip("sklearn")
    pytest.importorskip("poseidon._core")
    small = ["--hosts", "2", "--link", "none", "--dataset", "digits", "--hidden", "64", "--segment", "5"]
    document = run_script("convergence.py", *small, "--target", "0.6", "--lr", "0.05", "--methods", "poseidon,ddp")
    return document["methods"]


@pytest.mark.parametrize(("place", "method"), [(0, "poseidon"), (1, "ddp")])
def test_convergence_stops_at_the_target(place: int, method: str) -> None:
    run = converged()[place]
    assert run["method"] == method
    *earlier, (seconds, steps, accuracy) = run["points"]
    assert accuracy >= 0.6
    assert all(point[2] < 0.6 for point in earlier)
    assert steps == 5 * len(run["points"])
    assert run["seconds_to_target"] == seconds > 0


def test_poseidon_and_ddp_take_the_same_way() -> None:
    poseidon, ddp = converged()
    assert [steps for _, steps, _ in poseidon["points"]] == [steps for _, steps, _ in ddp["points"]]
    for (_, _, mine), (_, _, theirs) in zip(poseidon["points"], ddp["points"], strict=True):
        assert mine == pytest.approx(theirs, abs=0.02)


def test_overhead_reports_a_share_of_the_bare_step() -> None:
    result = run_script("overhead.py", "--step-ms", "5", "--steps", "6", "--width", "64", "--depth", "4")
    assert result["bare_seconds"] > 0
    assert -1 < result["overhead"] < 20  # other tests run at the same time


@pytest.mark.parametrize(
    ("script", "line"), [("flood.py", "median ratio"), ("neighbours.py", "median")], ids=["flood", "neighbours"]
)
def test_disturbances_are_measured_and_judged(script: str, line: str) -> None:
    pytest.importorskip("poseidon._core")
    command = [sys.executable, str(BENCH / script), "--rounds", "1", "--seconds", "0.2", "--mib", "1"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    verdict = answer.stdout.splitlines()[-1]
    assert verdict.startswith(line), answer.stderr
    assert verdict.endswith("MISSED" if answer.returncode else "met")


CHECKPOINT_COST = """
import argparse, sys
import checkpoint_cost

def work(rank, address, args, results):
    if args.fails:
        sys.exit(rank)
    if rank == 0:
        results.put([0.1] * 20000)

if __name__ == "__main__":
    checkpoint_cost.work, checkpoint_cost.serving = work, lambda *_: ""
    args = argparse.Namespace(every=10, server_cores=1, fails=len(sys.argv) > 1)
    print(len(checkpoint_cost.measure(args, "")))
"""


@pytest.mark.parametrize("more", [[], ["fails"]])
def test_results_are_taken_before_workers_are_waited_for(tmp_path: Path, more: list[str]) -> None:
    """What does not fit into a pipe keeps its worker from ending."""
    (tmp_path / "work.py").write_text(CHECKPOINT_COST)
    command = [sys.executable, str(tmp_path / "work.py"), *more]
    environment = {**os.environ, "PYTHONPATH": str(BENCH)}
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env=environment)
    assert (answer.stdout, answer.stderr) == (("", "a worker failed\n") if more else ("2000\n", ""))


def test_ideal_ports_come_close_to_the_bound_with_small_messages_and_never_beat_it() -> None:
    """The bound looks at one port, the model at all of them: so it also checks the bound."""
    rows = run_script("fluid_ports.py", "--model", "GPT-2", "--hosts", "4", "--scale", "16", "--mbit", "10")
    reached = {(row["chunk_kib"], row["held_kib"], row["uneven"]): row["of_bound"] for row in rows}
    assert all(0.5 < one <= 1.0 + 1e-9 for one in reached.values())
    assert reached[4, 4, 0.0] > 0.97
    assert reached[4, 4, 0.0] > reached[16, 64, 0.0] > reached[16, 64, 0.3]
