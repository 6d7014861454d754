"""`bench/tenants.py`: jobs that share a server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))


def test_jains_index_says_how_many_share() -> None:
    from tenants import jain_index

    assert jain_index([3.0, 3.0, 3.0, 3.0]) == pytest.approx(1)
    assert jain_index([5.0, 0.0, 0.0, 0.0]) == pytest.approx(1 / 4)


def test_only_steps_beside_all_other_jobs_count() -> None:
    from poseidon.bench.hosts.measures import Counters
    from tenancy.hosts import Sample, WorkerRun, overlapping

    steady = [Sample(-1.0, Counters(received=5, sent=5)), Sample(4.0, Counters(received=55, sent=105))]
    late = [Sample(-0.1, Counters(received=0, sent=0)), Sample(3.9, Counters(received=80, sent=0))]
    runs = {
        0: [
            WorkerRun([0.0, 1.0, 2.0, 3.0, 4.0], Counters(received=8, sent=10), steady, "a"),
            WorkerRun([0.1, 1.1, 2.2, 3.3, 4.4], Counters(received=8, sent=10), steady, "a"),
        ],
        1: [WorkerRun([0.9, 1.9, 2.9, 3.9], Counters(received=6, sent=4), late, "b")],
    }
    jobs = overlapping(runs)
    assert jobs[0].steps == pytest.approx([1.1, 1.1])  # 1.1 to 2.2 to 3.3: later ones end when job 1 has ended
    assert jobs[1].steps == pytest.approx([1.0, 1.0, 1.0])
    assert jobs[0].bits_per_second == pytest.approx(20 * 8 / 1.1)
    assert jobs[1].bits_per_second == pytest.approx(6 * 8)
    assert jobs[0].digests == ["a", "a"]


def test_a_part_that_is_not_there_is_told() -> None:
    command = [sys.executable, str(BENCH / "tenants.py"), "--parts", "room,kitchen"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 2
    assert "there is no part kitchen" in answer.stderr


def test_a_job_that_ends_no_step_has_what_passed_its_port() -> None:
    from poseidon.bench.hosts.measures import Counters
    from tenancy.hosts import Sample, WorkerRun, overlapping

    slow = [Sample(-1.0, Counters(received=5, sent=5)), Sample(9.0, Counters(received=105, sent=205))]
    fast = [Sample(0.0, Counters(received=0, sent=0)), Sample(4.0, Counters(received=8, sent=8))]
    of_step = Counters(received=2, sent=2)
    jobs = overlapping(
        {
            0: [WorkerRun([3.5, 9.0], of_step, slow, "a")],
            1: [WorkerRun([0.0, 1.0, 2.0, 3.0, 4.0], of_step, fast, "b")],
        }
    )
    assert jobs[0].steps == []
    assert jobs[0].bits_per_second == pytest.approx(20 * 8)  # from 0 to 4
