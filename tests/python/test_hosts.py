"""`poseidon run --hosts`: jobs on four hosts with an sshd each, which come and go; replicas, copies and figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("poseidon._core", reason="the compiled core is not built")

from hosts_cases import (
    ENDLESS,
    MANY,
    NEEDS_HOSTS,
    SHARDED,
    SUM,
    TRAIN,
    cleared,
    hosts,
    marked,
    read_bytes,
    refusal,
    run,
    started,
)
from ssh_hosts import SshHosts
from waiting import happens, wait_until

pytestmark = [NEEDS_HOSTS, pytest.mark.usefixtures("cleared")]
__all__ = ["cleared", "hosts"]  # fixtures


def test_a_job_on_all_hosts(hosts: SshHosts) -> None:
    script = hosts.write("train.py", SUM)
    done = run(hosts, "a,b:2,c,d", script.name)
    assert done.returncode == 0, done.stderr
    assert "5 workers: 1 on a, 2 on b, 1 on c, 1 on d; rank 0 at " in done.stderr
    places = ["0 a", "1 b", "2 b", "3 c", "4 d"]
    expected = [f"[{place}] sum 15.0 of 5 local {int(place == '2 b')}" for place in places]
    assert sorted(done.stdout.splitlines()) == expected


def test_a_file_of_hosts_variables_and_options(hosts: SshHosts) -> None:
    script = hosts.write(
        "train.py",
        "import os, poseidon\n"
        "with poseidon.connect() as exchange:\n"
        "    if exchange.rank == 1: print(os.environ['A'], os.environ['B'], os.environ.get('C'), "
        "os.environ['POSEIDON_FLOWS'], os.environ['OMP_NUM_THREADS'], 'RUN' if os.environ['POSEIDON_RUN'] else '')\n",
    )
    file = hosts.write("hosts.txt", "# two of four\na slots=1\nc:1   # with its number\n")
    command = hosts.command(str(file), "--flows", "2", script.name, options=["--env", "A", "--env", "B=2"])
    environment = {**os.environ, "A": "1", "C": "3", "OMP_NUM_THREADS": "7"}
    done = subprocess.run(
        command, cwd=hosts.work, capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[1 c] 1 2 None 2 7 RUN\n"


def test_the_secret_is_on_no_command_line(hosts: SshHosts) -> None:
    script = hosts.write("train.py", ENDLESS)
    secret = "a-secret-of-the-job-1234567890"
    with started(hosts, "a,b", script.name, env={"POSEIDON_SECRET": secret}):
        lines = [read_bytes(path) for path in Path("/proc").glob("[0-9]*/cmdline")]
        assert not any(secret.encode() in line for line in lines)
        own = [read_bytes(Path(f"/proc/{process}/environ")) for process in marked()]
        assert sum(f"POSEIDON_SECRET={secret}".encode() in one for one in own) >= 2, "but the workers have it"


def test_machines_come_and_go_as_the_file_of_hosts_says(hosts: SshHosts) -> None:
    script = hosts.write("train.py", TRAIN)
    file = hosts.folder / "hosts.txt"
    file.write_text("a\n")

    def says(text: str) -> None:
        wait_until(lambda: text in job.text or job.process.poll() is not None, lambda: job.text)
        assert text in job.text

    with started(hosts, str(file), "--workers", "1:3", script.name, MANY) as job:
        (hosts.work_of("c") / "train.py").unlink()
        file.write_text("a\nb slots=2\nc\n")
        says("host b comes: ranks 1, 2 are started")
        says("host c has no train.py: copy it there, or let --sync do it")
        says("together 3")
        file.write_text("a\nc\n")
        says("host b is not in the file any more: ranks 1, 2 are asked to leave")
        (hosts.work_of("c") / "train.py").write_text(TRAIN)
        file.write_text("b\nc\n")
        says("host a has rank 0, where all meet: it stays")
        says("host c comes: rank ")
        says("host b comes: rank ")
        file.write_text("a\nb slots=none\n")
        says("the file of hosts is not followed: ")
        assert "failed" not in job.text
    assert "all ranks have ended" in job.text


def test_each_machine_is_a_replica_of_a_sharded_model(hosts: SshHosts) -> None:
    script = hosts.write("train.py", SHARDED)
    options = ("--replicas", "--on-failure", "rejoin")
    done = run(hosts, "a:2,b:2", script.name, options=options)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "2 replicas of 2 workers: 2 on a, 2 on b" in done.stderr
    restarted = "rank 2 on b failed, killed by SIGKILL; all ranks of its replica are started again (restart 1 of 3)"
    assert restarted in done.stderr
    shards = sorted(line.partition("] ")[2] for line in done.stdout.splitlines() if "shard " in line)
    assert [line.split()[:5] for line in shards] == [["shard", rank, "of", "2", "in"] for rank in "0011"]
    assert (shards[0], shards[2]) == (shards[1], shards[3]), "of two replicas"
    assert refusal(hosts, "a:2,b", script.name, options=options) == (
        "replicas must have equally many ranks, and here they have: a 2, b 1"
    )


def test_top_shows_the_workers_where_the_run_was_started(hosts: SshHosts) -> None:
    script = hosts.write("train.py", TRAIN)
    command = [sys.executable, "-m", "poseidon", "top", "--once", "--json"]

    def shown() -> list[int]:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return [one["rank"] for one in json.loads(done.stdout) if one["job"] == "shown"]

    with started(hosts, "b,d", "--job", "shown", script.name, MANY):
        wait_until(lambda: shown() == [0, 1], lambda: str(shown()), every=0.5)
    assert happens(lambda: not shown(), 10.0)


def test_sync_copies_what_git_does_not_ignore(hosts: SshHosts) -> None:
    (hosts.work / "package").mkdir()
    (hosts.work / "package" / "__init__.py").write_text("from package.model import SIZE\n")
    (hosts.work / "package" / "model.py").write_text("SIZE = 3\n")
    (hosts.work / "train.py").write_text("import package\n" + SUM + "    print(package.SIZE)\n")
    (hosts.work / ".gitignore").write_text("data\n")
    (hosts.work / "data").write_text("much")
    subprocess.run(["git", "init", "-q"], cwd=hosts.work, check=True)
    lines = refusal(hosts, "a,b", "train.py").splitlines()
    names = ["train.py", "package/__init__.py", "package/model.py"]
    assert sorted(lines) == sorted(
        f"host {host} has no {name}: copy it there, or let --sync do it" for host in "ab" for name in names
    )
    done = run(hosts, "a,b", "--sync", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("] 3\n") == 2
    assert not (hosts.work_of("a") / "data").exists()
    (hosts.work_of("b") / "package" / "model.py").write_text("SIZE = 4\n")
    assert refusal(hosts, "a,b", "train.py") == (
        "package/model.py of host b differs from the one here: copy it there, or let --sync do it"
    )


def test_nothing_is_lost_while_nobody_reads(hosts: SshHosts) -> None:
    script = hosts.write(
        "train.py",
        "import os, sys\n"
        "if os.environ['RANK'] == '1':\n"
        "    print('RESULT')\n"
        "    sys.exit('the last words')\n"
        "for number in range(100_000):\n"
        "    print('x' * 60, number)\n",
    )
    command = hosts.command("a:2", script.name)
    with subprocess.Popen(command, cwd=hosts.work, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        time.sleep(6)  # nothing tells that the command waits for a reader
        out, errors = process.communicate(timeout=60)
    assert b"[1 a] RESULT" in out
    assert b"the last words" in errors
    assert process.returncode == 1


def test_a_secret_that_the_configuration_file_names(hosts: SshHosts) -> None:
    script = hosts.write("train.py", "import os; print(os.environ['POSEIDON_SECRET'])\n")
    secret = hosts.folder / "secret"
    secret.write_text("a-secret-in-a-file-123456\n")
    secret.chmod(0o600)
    hosts.write("poseidon.toml", f'secret_file = "{secret}"\n')
    done = run(hosts, "a", script.name)
    assert done.stdout == "[0 a] a-secret-in-a-file-123456\n", done.stderr
