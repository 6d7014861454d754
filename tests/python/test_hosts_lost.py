"""Runs on several hosts: how they end, and what happens when a worker, an agent or a host is lost."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("poseidon._core", reason="the compiled core is not built")

from hosts_cases import (
    DETECTED_S,
    END_S,
    ENDLESS,
    MANY,
    MARK,
    NEEDS_HOSTS,
    SUM,
    TRAIN,
    agents,
    cleared,
    hosts,
    marked,
    parent_of,
    read_bytes,
    run,
    seconds_to_end,
    started,
)
from ssh_hosts import NAMES, SshHosts
from waiting import SLOWED, happens, wait_until

pytestmark = [NEEDS_HOSTS, pytest.mark.usefixtures("cleared")]
__all__ = ["cleared", "hosts"]  # fixtures


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_command_is_ended(hosts: SshHosts, number: signal.Signals) -> None:
    script = hosts.write("train.py", ENDLESS)
    with started(hosts, "a,b,c,d", script.name) as job:
        since = time.monotonic()
        job.process.send_signal(number)
        assert seconds_to_end(since) < END_S * SLOWED
        assert job.process.wait(10) == (-number if number == signal.SIGKILL else 128 + number)
        if number != signal.SIGKILL:
            assert f"the run was interrupted by {number.name}; all ranks have ended" in job.text


@pytest.mark.parametrize("pause", [0.0, 0.5, 1.0])
def test_it_is_interrupted_before_the_run(hosts: SshHosts, pause: float) -> None:
    job = started(hosts, ",".join(NAMES), hosts.write("train.py", ENDLESS).name)
    wait_until(agents, "its first connection")
    time.sleep(pause)  # that very moment is what is tested
    job.process.send_signal(signal.SIGINT)
    since = time.monotonic()
    assert job.process.wait(30) == 128 + signal.SIGINT
    assert seconds_to_end(since) < END_S * SLOWED


def test_what_has_left_its_process_group_ends_too(hosts: SshHosts) -> None:
    script = hosts.write(
        "train.py",
        "import subprocess, sys\n"
        "code = 'import signal; signal.pause()'\n"
        f"subprocess.Popen([sys.executable, '-c', code, '{MARK}'], start_new_session=True)\n" + ENDLESS,
    )
    with started(hosts, "a,b", script.name) as job:
        assert len(marked()) > 4, "workers, the command and its parts, and daemons"
        job.process.send_signal(signal.SIGINT)
        assert seconds_to_end(time.monotonic()) < END_S * SLOWED


def test_a_killed_command_leaves_no_files(hosts: SshHosts) -> None:
    script = hosts.write("train.py", ENDLESS)
    with started(hosts, "a", script.name) as job:
        children = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
        words = [word for pid in children for word in read_bytes(Path(f"/proc/{pid}/cmdline")).decode().split("\0")]
        folders = [Path(word) for word in words if "/poseidon-run-" in word]
        assert [folder.is_dir() for folder in folders] == [True]
        job.process.kill()
        job.process.wait()
        assert happens(lambda: not folders[0].exists(), 10.0)


def test_a_lost_host_is_the_failure_of_its_worker(hosts: SshHosts) -> None:
    script = hosts.write("train.py", ENDLESS)
    with started(hosts, "a,b,c", script.name) as job:
        since = time.monotonic()
        hosts.on("c", "ip", "link", "set", "eth0", "down")
        try:
            assert job.process.wait(60) != 0
            assert seconds_to_end(since) < (END_S + DETECTED_S) * SLOWED, "also on the host that hears nothing"
        finally:
            hosts.on("c", "ip", "link", "set", "eth0", "up")
    assert "rank 2 on c" in job.text
    assert "host c cannot be reached by ssh" in job.text or "the connection to c was lost" in job.text


def test_the_others_go_on_without_a_lost_host(hosts: SshHosts) -> None:
    script = hosts.write("train.py", TRAIN)
    with started(
        hosts, "a,b,c", "--on-failure", "shrink", "--max-restarts", "0", "--timeout", "30", script.name, MANY
    ) as job:
        hosts.on("c", "ip", "link", "set", "eth0", "down")
        try:
            told = "rank 2 on c failed, as the connection to c was lost; it is not started again, the others go on"
            wait_until(lambda: told in job.text, lambda: job.text)
            wait_until(lambda: "together 2" in job.text, lambda: job.text)
        finally:
            hosts.on("c", "ip", "link", "set", "eth0", "up")


def test_rank_zero_is_where_all_meet(hosts: SshHosts) -> None:
    script = hosts.write("train.py", TRAIN.replace("poseidon.rank() == 1", "poseidon.rank() == 0"))
    options = ("--on-failure", "shrink", "--max-restarts", "0")
    done = run(hosts, "a,b", *options, script.name, MANY, "kill")
    assert done.returncode == 128 + signal.SIGKILL
    assert "the others cannot go on: they meet at the machine of rank 0 on a" in done.stderr
    assert "rank 0 on a failed first, killed by SIGKILL" in done.stderr


def test_an_agent_that_stands_still_is_given_up(hosts: SshHosts) -> None:
    script = hosts.write("train.py", ENDLESS)
    with started(hosts, "a,b", script.name) as job:
        # Of ssh, sh and the agent, which all have its name among their arguments, it is the one that has workers.
        stopped = sorted({parent_of(pid) for pid in marked()} & set(agents()))[:1]
        assert stopped
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            assert job.process.wait(60) != 0
            assert "its agent has said nothing for 10 s" in job.text
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)


def test_a_failed_worker_is_named_with_its_machine_and_last_words(hosts: SshHosts) -> None:
    more = "    if exchange.rank == 2: raise ValueError('the data is bad')\n    exchange.barrier()\n"
    script = hosts.write("train.py", SUM + more)
    done = run(hosts, "a,b,c", script.name)
    assert done.returncode == 1
    assert "poseidon: rank 2 on c failed first, with exit code 1" in done.stderr
    assert "poseidon: the cause: ValueError: the data is bad" in done.stderr
    assert "[2 c] ValueError: the data is bad" in done.stderr


def test_a_killed_worker_is_started_again_on_its_machine(hosts: SshHosts) -> None:
    script = hosts.write("train.py", TRAIN)
    done = run(hosts, "a,b", "--on-failure", "rejoin", script.name, "6", "kill")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "rank 1 on b failed, killed by SIGKILL; it is started again (restart 1 of 3)" in done.stderr
    weights = {line.split()[-1] for line in done.stdout.splitlines() if " weight " in line}
    assert len(weights) == 1
    assert (hosts.work_of("b") / "died").exists()


def test_a_host_that_comes_back_is_connected_to_again(hosts: SshHosts) -> None:
    script = hosts.write("train.py", TRAIN)
    with started(hosts, "a,b", "--on-failure", "rejoin", script.name, MANY) as job:
        hosts.on("b", "ip", "link", "set", "eth0", "down")
        try:
            told = "rank 1 on b failed, as the connection to b was lost; it is started again (restart 1 of 3)"
            wait_until(lambda: told in job.text, lambda: job.text)
        finally:
            hosts.on("b", "ip", "link", "set", "eth0", "up")
        wait_until(lambda: job.text.count(f"[1 b] runs {MARK}") == 2, lambda: job.text)
