"""MASTER_ADDR as names give it: a loopback address on rank 0's machine, and an address that comes later."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from poseidon.launch import free_port
from poseidon.testbed import missing_requirements

pytestmark = pytest.mark.skipif(bool(missing_requirements()), reason="needs root and iproute2")

MACHINES = ("psdnames0", "psdnames1")  # network namespaces
PROGRAM = """
import torch
import poseidon.torch as poseidon
torch.set_num_threads(1)
print("joins", flush=True)
poseidon.init(timeout=20, flight_record="off")
print(poseidon.all_reduce(poseidon.rank() + 1))
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[Path]]:
    """Two machines that are connected: their lists of hosts, in which the first one is called "first"."""
    files = [Path("/etc/netns", machine, "hosts") for machine in MACHINES]
    try:
        for machine, file in zip(MACHINES, files, strict=True):
            ip("netns", "add", machine)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("127.0.0.1 localhost\n")
        ip("link", "add", "psdn", "netns", MACHINES[0], "type", "veth", "peer", "name", "psdn", "netns", MACHINES[1])
        for number, machine in enumerate(MACHINES, start=1):
            ip("-n", machine, "addr", "add", f"10.211.77.{number}/24", "dev", "psdn")
            for device in ("lo", "psdn"):
                ip("-n", machine, "link", "set", device, "up")
        yield files
    finally:
        for machine, file in zip(MACHINES, files, strict=True):
            subprocess.run(["ip", "netns", "del", machine], check=False, capture_output=True)
            file.unlink(missing_ok=True)
            file.parent.rmdir()


def start(rank: int, program: Path, port: int) -> subprocess.Popen[str]:
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "first", "MASTER_PORT": str(port)}
    return subprocess.Popen(
        ["ip", "netns", "exec", MACHINES[rank], sys.executable, str(program)],
        env={**os.environ, **place, "POSEIDON_SECRET": "a secret of this test"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("comes_late", [False, True])
def test_ranks_meet_at_a_name(hosts: list[Path], comes_late: bool, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with hosts[0].open("a") as file:
        file.write("127.0.1.1 first\n")  # as Debian has it
    others = "10.211.77.1 first\n"
    if not comes_late:
        hosts[1].write_text(others)
    port = free_port()
    ranks = [start(rank, program, port) for rank in range(2)]
    if comes_late:
        assert ranks[1].stdout.readline() == "joins\n"
        time.sleep(1)  # nothing outside shows that rank 1 has tried in vain
        with hosts[1].open("w") as file:
            file.write(others)
    for process in ranks:
        output, errors = process.communicate(timeout=40)
        assert (output.splitlines()[-1:], process.returncode) == (["3"], 0), errors
