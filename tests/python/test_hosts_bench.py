"""`poseidon bench cluster` on hosts with an sshd each: what it writes, and who reads it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from poseidon.bench.cluster.network import _partners
from poseidon.planner.cluster import make_cluster, read_settings
from ssh_hosts import NAMES, SshHosts, missing, ssh_hosts

needs_hosts = pytest.mark.skipif(bool(missing()), reason=f"needs {', '.join(missing())}")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with ssh_hosts(tmp_path_factory.mktemp("hosts"), "100mbit") as found:
        yield found


def bench(hosts: SshHosts, names: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "poseidon", "bench", "cluster", "--hosts", names, "--ssh", hosts.ssh, *words]
    inside = hosts.testbed.command(len(NAMES), command)
    return subprocess.run(inside, cwd=hosts.work, capture_output=True, text=True, timeout=200, check=False)


@needs_hosts
def test_two_machines_give_a_page_and_a_file_that_plan_reads(hosts: SshHosts, tmp_path: Path) -> None:
    small = ("--models", "CIFAR-10 quick", "--methods", "poseidon,ddp", "--scale", "2", "--steps", "1", "--rounds", "1")
    done = bench(hosts, "a,b", *small, "--slower", "0.2", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "cluster.json").read_text())
    assert [one["method"] for one in found["steps"]] == ["poseidon", "ddp"]
    assert all(one["step_s"] > 0 and one["predicted_s"] > 0 for one in found["steps"])
    rates = found["network"]["rates"]
    assert all(8e6 < rates[a][1 - a] < 13e6 and rates[a][a] == 0 for a in (0, 1)), (
        "a port of 100 Mb/s in both directions"
    )
    assert 0 < found["cluster"]["latency_ms"] < 50
    assert "a," not in json.dumps(found), "it has no names of machines"
    cluster = make_cluster(read_settings(tmp_path / "cluster.json"))
    assert cluster.hosts == 2
    assert 85e6 < cluster.bits_per_second < 105e6
    page = (tmp_path / "cluster.html").read_text()
    assert "CIFAR-10 quick" in page
    plan = [sys.executable, "-m", "poseidon", "plan", "VGG19", "--cluster", str(tmp_path / "cluster.json")]
    assert "2 hosts" in subprocess.run(plan, capture_output=True, text=True, check=True).stdout


@needs_hosts
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--models", "ResNet-51"), "ResNet-51"),
        (("--methods", "poseidom"), "unknown method 'poseidom'"),
        (("--out", "/proc/nothing"), "--out"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_started(hosts: SshHosts, words: tuple[str, ...], text: str) -> None:
    done = bench(hosts, "a,b", *words)
    assert done.returncode != 0
    assert text in done.stderr
    assert "workers" not in done.stderr, "nothing was started"


@needs_hosts
def test_one_worker_of_each_machine_measures(hosts: SshHosts) -> None:
    assert "without numbers of workers" in bench(hosts, "a:2,b").stderr


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8])
def test_in_each_round_of_pairs_everybody_has_another_partner(count: int) -> None:
    of_all = [list(_partners(rank, count)) for rank in range(count)]
    for rank, partners in enumerate(of_all):
        assert sorted(one for one in partners if one is not None) == [one for one in range(count) if one != rank]
        for number, partner in enumerate(partners):
            assert partner is None or of_all[partner][number] == rank
