"""deploy/poseidon-server.service on a booted Debian: it starts, is started again, drains and stays down."""

from __future__ import annotations

import json
import subprocess
import sys
import time

from debian import Machine
from places import PROJECT, SECRET

UNIT = "poseidon-server"


def property_of(machine: Machine, name: str) -> str:
    return machine.run(f"systemctl show -P {name} {UNIT}").strip()


def healthy(machine: Machine) -> None:
    ask = "from urllib.request import urlopen; print(urlopen('http://127.0.0.1:7070/healthz').status)"
    machine.wait(f'python3 -c "{ask}" 2>/dev/null', "200")


def trains(machine: Machine, *arguments: str) -> subprocess.Popen[str]:
    """A job of two workers, from a machine that has PyTorch."""
    run = [sys.executable, "-m", "poseidon", "run", "-n", "2", "--on-failure", "rejoin", "--servers", "127.0.0.1:7000"]
    script = [str(PROJECT / "examples/recovery.py"), "--dataset", "digits", "--log-every", "10", *arguments]
    command = machine.from_outside([*run, "--secret-file", str(SECRET)])
    return subprocess.Popen([*command, *script], stdout=subprocess.PIPE, text=True)


def losses(text: str) -> list[str]:
    return [line[line.index("step") :] for line in text.splitlines() if "loss" in line]


def test_the_server_runs_as_nobody_in_particular_and_answers(machine: Machine) -> None:
    machine.wait(f"systemctl is-active {UNIT}", "active")
    healthy(machine)
    assert json.loads(machine.run("poseidon server jobs --json"))["jobs"] == []
    owner = machine.run(f"stat -c %u /proc/{property_of(machine, 'MainPID')}").strip()
    assert int(owner) >= 61184, "a dynamic user"


def test_a_job_outlives_the_server(machine: Machine) -> None:
    healthy(machine)
    told, _ = trains(machine, "--steps", "300").communicate(timeout=120)
    undisturbed = losses(told)
    assert len(undisturbed) == 30

    before = property_of(machine, "MainPID")
    job = trains(machine, "--steps", "300")
    assert job.stdout is not None
    seen = job.stdout.readline() + job.stdout.readline()
    machine.run(f"systemctl kill -s KILL {UNIT}")
    rest, _ = job.communicate(timeout=120)
    assert job.returncode == 0
    assert losses(seen + rest) == undisturbed
    assert property_of(machine, "MainPID") not in (before, "0")
    assert property_of(machine, "NRestarts") == "1"


def test_a_drained_server_stays_down_until_it_is_started(machine: Machine) -> None:
    healthy(machine)
    machine.run("poseidon server drain")
    machine.wait(f"systemctl is-active {UNIT}", "inactive")
    assert property_of(machine, "Result") == "success"
    time.sleep(2.5)  # RestartSec is 2 s, after which a unit that comes again would be here
    assert machine.run(f"systemctl is-active {UNIT}", check=False).strip() == "inactive"
    machine.run(f"systemctl start {UNIT}")
    healthy(machine)


def test_it_stops_at_once(machine: Machine) -> None:
    healthy(machine)
    begin = time.monotonic()
    machine.run(f"systemctl stop {UNIT}")
    assert time.monotonic() - begin < 5
    assert property_of(machine, "Result") == "success"
