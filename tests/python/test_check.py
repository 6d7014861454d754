"""`poseidon doctor --before`: each trouble of a machine and of a network gets its finding."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from poseidon.check.before import (
    check_before,
    check_buffers,
    check_congestion,
    check_files,
    check_frequency,
    check_name,
)
from poseidon.check.interfaces import Interface, check_interface
from poseidon.check.neighbours import check_neighbours
from poseidon.check.pairs import Responder, ask, judge_answers, judge_rates
from poseidon.launch import free_port
from poseidon.options.secret import VARIABLE, fresh
from poseidon.testbed import Testbed, missing_requirements

missing = missing_requirements()
TOKEN = b"0123456789abcdef"
TCP = "proc/sys/net/ipv4"


def system(root: Path, **files: str) -> Path:
    """A root with these files; `__` in a name is a `/`."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_few_file_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    for hard, found in ((1024, True), (65536, False), (resource.RLIM_INFINITY, False)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, hard=hard: (1024, hard))
        assert (check_files() is not None) is found


def test_small_buffers_are_judged_by_the_port(tmp_path: Path) -> None:
    root = system(tmp_path, **{f"{TCP}/tcp_rmem": "4096 131072 6291456", f"{TCP}/tcp_wmem": "4096 16384 4194304"})
    assert check_buffers(root, Interface("eth0", ("10.0.0.1",), 1500, 10_000)) is None
    found = check_buffers(root, Interface("eth0", ("10.0.0.1",), 1500, 40_000))
    assert found is not None
    assert found.mend == 'sysctl -w net.ipv4.tcp_wmem="4096 16384 5000000"'


def test_bbr_is_found_only_where_reno_may_not_be_chosen(tmp_path: Path) -> None:
    names = (f"{TCP}/tcp_congestion_control", f"{TCP}/tcp_allowed_congestion_control")
    for name, allowed, found in (("bbr", "bbr", True), ("bbr", "reno bbr", False), ("cubic", "cubic", False)):
        root = system(tmp_path, **dict(zip(names, (name, allowed), strict=True)))
        assert (check_congestion(root) is not None) is found


def test_a_governor_that_keeps_the_clock_low(tmp_path: Path) -> None:
    folder = "sys/devices/system/cpu/cpu0/cpufreq"
    for driver, governor, found in (
        ("acpi-cpufreq", "powersave", True),
        ("intel_pstate", "powersave", False),
        ("acpi-cpufreq", "performance", False),
    ):
        root = system(tmp_path, **{f"{folder}/scaling_driver": driver, f"{folder}/scaling_governor": governor})
        assert (check_frequency(root) is not None) is found


def test_what_the_system_does_not_tell_is_no_finding(tmp_path: Path) -> None:
    assert check_buffers(tmp_path, None) is check_congestion(tmp_path) is check_frequency(tmp_path) is None


def test_the_name_of_rank_0() -> None:
    assert check_name("127.0.0.1", several_machines=False) is None
    loopback = check_name("localhost", several_machines=True)
    assert loopback is not None
    assert "only this machine reaches" in loopback.text
    unknown = check_name("no-such-machine.invalid", several_machines=True)
    assert unknown is not None
    assert "has no address here" in unknown.text


def test_a_faster_port_that_lies_idle() -> None:
    slow, fast = Interface("eth0", ("10.0.0.1",), 1500, 1000), Interface("eth1", ("10.1.0.1",), 1500, 25_000)
    bridge = Interface("docker0", ("172.17.0.1",), 1500, 0, own_port=False)
    found = check_interface([slow, fast, bridge], slow.addresses[0])
    assert found is not None
    assert "POSEIDON_INTERFACES=eth1" in found.mend
    assert check_interface([slow, fast, bridge], fast.addresses[0]) is None
    on_bridge = check_interface([bridge, slow], bridge.addresses[0])
    assert on_bridge is not None
    assert "docker0, a bridge" in on_bridge.text


def test_a_busy_neighbour_is_named() -> None:
    with contextlib.ExitStack() as stack:
        command = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
        for _ in range(os.cpu_count() or 1):
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(process.kill)
            process.stdout.readline()
        found = check_neighbours()
    assert found is not None
    assert "cores, process" in found.text or "hypervisor" in found.text


@pytest.mark.parametrize("loopback", ["127.0.0.1", "::1"])
def test_a_probe_tells_the_mark_the_clock_and_what_fits(loopback: str) -> None:
    with contextlib.closing(Responder(loopback, TOKEN, clock=lambda: time.time() + 3)) as responder:
        place = (loopback, responder.port)
        answer = ask(place, TOKEN, dscp=46)
        assert answer is not None
        assert answer.dscp == 46
        assert answer.skew_s == pytest.approx(3, abs=0.5)
        assert ask(place, TOKEN, packet_bytes=9000) is not None
        assert ask(place, TOKEN, packet_bytes=65_500) is not None
        assert ask(place, TOKEN, packet_bytes=100_000) is None
        assert ask(place, b"another token...") is None


def answers(**changed: tuple[int, int, int, float]) -> list[str]:
    """What is found of three machines, if `from_to` is as given and the others are well."""
    about = np.ones((3, 3, 4))
    about[..., 3] = 0
    for pair, values in changed.items():
        about[int(pair[1]), int(pair[2])] = values
    return [one.about for one in judge_answers(["a", "b", "c"], about, [1500] * 3)]


def test_answers_are_judged() -> None:
    assert answers() == []
    assert answers(p01=(0, 0, 0, 0)) == ["firewall"]
    assert answers(p01=(1, 0, 1, 0)) == ["DSCP"]
    assert answers(p12=(1, 1, 0, 0)) == ["MTU"]
    assert answers(p12=(1, 1, 1, -4)) == ["clocks"]


def test_rates_are_judged() -> None:
    rates = np.full((3, 3), 1e9)
    assert list(judge_rates("abc", rates.tolist())) == []
    rates[0, 1] = 1e8
    (one,) = judge_rates("abc", rates.tolist())
    assert (one.about, one.text) == ("asymmetric pair", "b sends a 100mbit, and gets 1gbit back")
    rates[1, 0] = 1e8
    (one,) = judge_rates("abc", rates.tolist())
    assert one.about == "slow pair"


def test_machines_that_do_not_meet_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": str(free_port())}
    for name, value in {**job, "MASTER_ADDR": "192.0.2.1", "POSEIDON_TIMEOUT": "1"}.items():
        monkeypatch.setenv(name, value)
    _, between = check_before(1)
    assert [one.about for one in between] == ["reach"]
    assert "192.0.2.1" in between[0].text


@pytest.mark.skipif(bool(missing), reason="shaped links need " + " and ".join(missing))
@pytest.mark.parametrize("version", [4, 6])
def test_troubles_of_a_testbed_are_found(version: int) -> None:
    """One host takes off the marks of what it sends, and another has packets of its own size."""
    with Testbed(3, "100mbit") as bed, contextlib.ExitStack() as stack:
        addresses = [host.address if version == 4 else f"fd00::{at + 1}" for at, host in enumerate(bed.hosts)]
        if version == 6:
            for host, address in enumerate(addresses):
                _on_host(bed, host, f"ip -6 addr add {address}/64 dev eth0 nodad")
        strip = shutil.which("iptables" if version == 4 else "ip6tables")
        if strip is not None:
            _on_host(bed, 1, f"{strip} -t mangle -A POSTROUTING -j DSCP --set-dscp 0")
        _on_host(bed, 2, "ip link set dev eth0 mtu 1400")
        job = {VARIABLE: fresh(), "WORLD_SIZE": "3", "MASTER_PORT": str(free_port()), "LOCAL_WORLD_SIZE": "1"}
        processes = []
        for host in range(3):
            variables = {**os.environ, **job, "RANK": str(host), "MASTER_ADDR": addresses[0]}
            command_line = [sys.executable, "-m", "poseidon", "doctor", "--before", "--json"]
            processes.append(
                stack.enter_context(bed.exec(host, command_line, env=variables, stdout=subprocess.PIPE, text=True))
            )
        told: list[dict[str, Any]] = [json.loads(process.communicate(timeout=60)[0]) for process in processes]
    found = {one["about"]: one["text"] for one in told[0]["between"]}
    if strip is not None:
        assert f"off packets from {addresses[1]} to {addresses[0]}" in found["DSCP"]
    assert f"{addresses[2]} 1400" in found["MTU"]
    assert "firewall" not in found
    assert [one["between"] for one in told[1:]] == [[], []]


def _on_host(bed: Testbed, host: int, command: str) -> None:
    with bed.exec(host, command.split()) as process:
        assert process.wait(10) == 0
