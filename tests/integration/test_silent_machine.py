"""A dedicated server gives back what a job held whose machines have lost their power: no FIN comes from them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from poseidon.admin import Address, AdminClient
from poseidon.launch import free_port
from server_process import started_server
from waiting import IN_PROGRAMS, end, wait_until

pytest.importorskip("poseidon._core", reason="the compiled core is not built")
pytestmark = pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2")

HERE, THERE = "10.222.77.1", "10.222.77.2"
SPACE, LINK_HERE, LINK_THERE = f"psd-silent-{os.getpid()}", f"psdh{os.getpid() % 100000}", f"psdt{os.getpid() % 100000}"
TIMEOUT_S = 4
WORKER = f"""{IN_PROGRAMS}
import numpy as np
import poseidon
with poseidon.connect(servers=[sys.argv[1]], rank=0, world_size=1, job="silent", timeout=60) as exchange:
    exchange.declare({{"w": np.zeros(1_000_000)}})
    exchange.push_pull("w", np.ones(1_000_000))
    print("trained", flush=True)
    stay(600)
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def other_machine() -> Iterator[None]:
    ip("netns", "add", SPACE)
    try:
        ip("link", "add", LINK_HERE, "type", "veth", "peer", "name", LINK_THERE, "netns", SPACE)
        ip("addr", "add", f"{HERE}/30", "dev", LINK_HERE)
        ip("link", "set", LINK_HERE, "up")
        ip("-n", SPACE, "addr", "add", f"{THERE}/30", "dev", LINK_THERE)
        ip("-n", SPACE, "link", "set", LINK_THERE, "up")
        ip("-n", SPACE, "link", "set", "lo", "up")
        yield
    finally:
        subprocess.run(["ip", "link", "del", LINK_HERE], check=False, capture_output=True)
        ip("netns", "del", SPACE)


def lose_power() -> None:
    """From now on no packet arrives at either end, and neither end is told."""
    nobody = ("lladdr", "02:00:00:00:00:99", "nud", "permanent")
    ip("neigh", "replace", THERE, *nobody, "dev", LINK_HERE)
    ip("-n", SPACE, "neigh", "replace", HERE, *nobody, "dev", LINK_THERE)


def test_the_job_of_a_machine_without_power_is_dropped_after_the_timeout() -> None:
    arguments = ("--interfaces", HERE, "--port", str(free_port()), "--admin", "0", "--timeout", str(TIMEOUT_S))
    with other_machine(), started_server(*arguments) as (_, start):
        client = AdminClient(Address.parse(start["admin"]))
        command = ["ip", "netns", "exec", SPACE, sys.executable, "-c", WORKER, start["address"]]
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "trained\n"
            assert client.jobs()["memory_bytes"] >= 4_000_000

            def jobs() -> list[dict[str, Any]]:
                return client.jobs()["jobs"]

            # It is silent, but its machine answers.
            wait_until(lambda: any(job["silent_s"] > 1.5 * TIMEOUT_S for job in jobs()), lambda: f"silence: {jobs()}")
            assert [job["state"] for job in jobs()] == ["running"]
            lose_power()
            began = time.monotonic()
            wait_until(
                lambda: [job["state"] for job in jobs()] != ["running"],
                "the job to be dropped",
                3 * TIMEOUT_S,
                every=0.1,
            )
            assert time.monotonic() > began + 1
            assert client.jobs()["memory_bytes"] == 0
        finally:
            end(worker)
