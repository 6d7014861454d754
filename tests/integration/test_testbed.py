"""The testbed with real namespaces and traffic. Skipped without root or iproute2."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from traffic_meter import judges_rates, metered

from poseidon.bench.exchange.methods import PLACEMENTS, parse_methods, parse_workload
from poseidon.bench.exchange.results import ExchangeConfig, ExchangeResult
from poseidon.bench.exchange.run import run_exchange
from poseidon.errors import InvalidArgument
from poseidon.launch import launch, run_workers
from poseidon.testbed import Layout, Testbed, TestbedError, missing_requirements, network, records, remove, state
from waiting import IN_PROGRAMS

missing = missing_requirements()
pytestmark = pytest.mark.skipif(bool(missing), reason="shaped links need " + " and ".join(missing))

POSEIDON = [sys.executable, "-m", "poseidon"]
RATE = 100_000_000


@pytest.fixture(scope="module")
def bed() -> Iterator[Testbed]:
    with Testbed(3, "100mbit") as testbed:
        yield testbed


def exists(testbed_id: int) -> bool:
    return bool(network.namespaces_of(testbed_id)) or testbed_id in [record.id for record in records()]


def test_hosts_have_names_and_addresses(bed: Testbed) -> None:
    assert [host.name for host in bed.hosts] == ["h0", "h1", "h2"]
    assert [host.address for host in bed.hosts] == [f"10.77.{bed.id}.{index}" for index in (1, 2, 3)]
    assert len(network.namespaces_of(bed.id)) == 4
    command = ["ip", "-j", "addr", "show", "eth0"]
    with bed.exec(1, command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        device = json.load(process.stdout)[0]
    assert device["mtu"] == 1500
    assert [entry["local"] for entry in device["addr_info"]] == [bed.hosts[1].address]


def test_hosts_know_each_other_without_asking(bed: Testbed) -> None:
    # What hosts find out themselves has one limit for all namespaces together. 33 hosts exceed it.
    for index, asking in enumerate(bed.hosts):
        with bed.exec(index, ["ip", "-j", "neigh"], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            known = json.load(process.stdout)
        assert {entry["dst"] for entry in known} == {host.address for host in bed.hosts if host is not asking}
        assert all(entry["state"] == ["PERMANENT"] for entry in known)


def test_nothing_of_it_is_in_the_machines_own_network(bed: Testbed) -> None:
    assert not any(address.startswith(f"10.77.{bed.id}.") for address in network.own_addresses())


def test_the_rate_of_a_host_changes_in_both_directions() -> None:
    with Testbed(3, "100mbit", priorities=2) as bed:
        bed.set_rate(1, "10mbit")
        slow = 10_000_000
        for source, destination in ((0, 1), (1, 0)):
            assert bed.copy_rate(source, destination, slow // 4) < 1.2 * slow, "the port's burst and no more"
        assert bed.copy_rate(0, 2, RATE // 8) > 2 * slow, "the other hosts keep their rate"
        with pytest.raises(InvalidArgument):
            bed.set_rate(1, "fast")


@judges_rates
def test_a_plain_copy_reaches_the_rate(bed: Testbed) -> None:
    # One second's worth, and the best of three: a port loses what it may not send while the machine does other work.
    rate = max(bed.copy_rate(0, 1, RATE // 8) for _ in range(3))
    assert 0.90 * RATE <= rate <= 1.01 * RATE


@judges_rates
def test_two_senders_share_the_receivers_port(bed: Testbed) -> None:
    with metered(bed.hosts[2].namespace, "eth0", RATE // 8) as rates:
        bed.copy_rates([(0, 2), (1, 2)], RATE // 16)
    assert 0.80 * RATE <= rates[0] <= 1.01 * RATE


@judges_rates
def test_both_directions_of_a_port_are_independent(bed: Testbed) -> None:
    rates = bed.copy_rates([(0, 1), (1, 0)], RATE // 16)
    assert min(rates) >= 0.80 * RATE
    assert max(rates) <= 1.01 * RATE


def test_a_failed_copy_is_an_error(bed: Testbed) -> None:
    with pytest.raises(IndexError):
        bed.copy_rate(0, 3, 1)


def test_each_port_has_a_subnet_that_leaves_by_it() -> None:
    with Testbed(2, "100mbit", ports=3) as bed:
        first, second = bed.hosts
        assert first.devices == ("eth0", "eth1", "eth2")
        assert second.address == second.addresses[0] == f"10.77.{bed.id}.2"
        assert second.addresses[1:] == (f"10.78.{bed.id}.2", f"10.79.{bed.id}.2")
        for device, source, destination in zip(first.devices, first.addresses, second.addresses, strict=True):
            command = bed.command(0, ["ip", "-j", "route", "get", destination])
            (route,) = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
            assert (route["dev"], route["prefsrc"]) == (device, source)
            classes = subprocess.run(
                bed.command(0, ["tc", "class", "show", "dev", device]), capture_output=True, check=True
            )
            assert b"rate 100Mbit" in classes.stdout


@pytest.mark.parametrize("ports", [0, 9])
def test_ports_that_cannot_be(ports: int) -> None:
    with pytest.raises(InvalidArgument, match=f"hosts of {ports} ports"):
        Testbed(2, ports=ports)


def test_an_id_whose_later_ports_would_clash_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with state.locked():
        free = state.free_id()
        monkeypatch.setattr(network, "own_addresses", lambda: [f"10.79.{free}.200"])
        assert state.free_id() != free


def exchange_over(ports: int, placement: str = "cs", methods: str = "poseidon,tcp-copy") -> ExchangeResult:
    pytest.importorskip("poseidon._core")
    return run_exchange(
        ExchangeConfig(
            workload=parse_workload("tensors:2x4MB", 1),
            worker_count=2,
            link="100mbit",
            placement=PLACEMENTS[placement],
            methods=parse_methods(methods),
            step_count=2,
            repeat_count=1,
            timeout_seconds=60,
            port_count=ports,
        )
    )


@judges_rates
def test_two_ports_carry_twice_the_bytes_of_one() -> None:
    for alone, both in zip(exchange_over(1).methods, exchange_over(2).methods, strict=True):
        assert alone.goodput_bits_per_second < 1.01 * RATE, alone.method
        assert both.goodput_bits_per_second > 1.7 * alone.goodput_bits_per_second, both.method
        assert len(alone.port_sent_bytes) == 1
        halves = both.port_sent_bytes
        assert sum(halves) == pytest.approx(alone.port_sent_bytes[0], rel=0.05), both.method
        assert min(halves) > 0.45 * sum(halves), both.method


@pytest.mark.parametrize("placement", ["cc", "ncc", "ncs"])
def test_dedicated_servers_serve_on_both_ports(placement: str) -> None:
    (entry,) = exchange_over(2, placement, "poseidon").methods
    assert min(entry.port_sent_bytes) > 0.45 * sum(entry.port_sent_bytes)


def test_down_leaves_nothing_and_ends_what_runs_inside() -> None:
    bed = Testbed(2, "1gbit")
    bed.up()
    testbed_id = bed.id
    process = bed.exec(0, ["sleep", "60"])
    bed.down()
    assert process.wait(timeout=10) == -signal.SIGTERM
    assert not exists(testbed_id)
    assert bed.hosts == []
    bed.down()


def test_a_failed_up_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def fail(testbed_id: int, *_: object) -> None:
        made.append(testbed_id)
        subprocess.run(["ip", "netns", "add", network.namespace_prefix(testbed_id) + "h0"], check=True)
        raise TestbedError("no")

    monkeypatch.setattr(network, "build", fail)
    with pytest.raises(TestbedError):
        Testbed(2).up()
    assert not exists(made[0])


def test_what_a_killed_owner_left_is_removed_by_the_next_up() -> None:
    program = (
        "import os, signal\nfrom poseidon.testbed import Testbed\nbed = Testbed(2)\nbed.up()\n"
        "print(bed.id, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == -signal.SIGKILL
    left = int(done.stdout)
    assert exists(left)
    with Testbed(1):
        # The id may be in use again, but not by a testbed with the owner that was killed.
        assert not any(record.is_stale() for record in records())
        assert network.namespaces_of(left) == [] or left in [record.id for record in records()]


def test_a_reused_pid_does_not_keep_a_testbed() -> None:
    start = state.start_of(os.getpid())
    assert start is not None
    assert not state.Record(0, Layout(1, 10**9), os.getpid(), start).is_stale()
    assert state.Record(0, Layout(1, 10**9), os.getpid(), start + 1).is_stale()
    assert not state.Record(0, Layout(1, 10**9)).is_stale()


def test_commands_up_status_down() -> None:
    def poseidon(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*POSEIDON, "testbed", *arguments], capture_output=True, text=True, timeout=30, check=False
        )

    made = json.loads(poseidon("up", "2", "--link", "31.25mbit", "--mtu", "9000", "--ports", "2", "--json").stdout)
    try:
        assert (made["link"], made["mtu"], made["ports"], len(made["hosts"])) == ("31.25mbit", 9000, 2, 2)
        assert made["hosts"][1]["addresses"] == [f"10.77.{made['id']}.2", f"10.78.{made['id']}.2"]
        found = [entry for entry in json.loads(poseidon("status", "--json").stdout) if entry["id"] == made["id"]]
        assert (found[0]["hosts"], found[0]["ports"]) == (made["hosts"], 2)
        assert json.loads(poseidon("down", str(made["id"]), "--json").stdout) == {"removed": [made["id"]]}
        assert not exists(made["id"])
        again = poseidon("down", str(made["id"]))
        assert again.returncode == 1
        assert f"there is no testbed {made['id']}" in again.stderr
    finally:
        if exists(made["id"]):
            remove(made["id"])


def test_workers_run_in_hosts_that_are_gone_afterwards(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, socket\n"
        "rank, address, port = int(os.environ['RANK']), os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])\n"
        "if rank == 0:\n"
        "    with socket.create_server((address, port)) as server:\n"
        "        print(address, *sorted(server.accept()[1][0] for _ in range(2)))\n"
        "else:\n"
        "    while True:\n"
        "        try: socket.create_connection((address, port), timeout=10).close(); break\n"
        "        except ConnectionRefusedError: pass\n"
    )
    lines: list[str] = []
    codes = launch([sys.executable, str(script)], 3, "100mbit", on_line=lambda rank, text: lines.append(text))
    assert codes == [0, 0, 0]
    addresses = lines[0].split()
    network_id = int(addresses[0].split(".")[2])
    assert addresses == [f"10.77.{network_id}.{index}" for index in (1, 2, 3)]
    assert not exists(network_id)


def test_interrupting_a_run_removes_its_hosts(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(IN_PROGRAMS + "import os\nprint(os.environ['MASTER_ADDR'], flush=True)\nstay()")
    errors = tmp_path / "errors"
    process = subprocess.Popen(
        [*POSEIDON, "run", "-n", "2", "--link", "1gbit", str(script)],
        stdout=subprocess.PIPE,
        stderr=errors.open("w"),
        text=True,
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(2)]  # both workers are there
    assert all(lines), errors.read_text()
    network_id, same = (int(line.split(".")[2]) for line in lines)
    assert network_id == same
    assert exists(network_id)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130
    process.stdout.close()
    assert not exists(network_id)


def test_a_testbed_that_is_up_is_used_and_kept(bed: Testbed) -> None:
    outcome = run_workers(["true"], 2, testbed=bed)
    assert outcome.codes == [0, 0]
    assert exists(bed.id)
    with pytest.raises(InvalidArgument, match="4 workers need 4 hosts, but the testbed has 3"):
        run_workers(["true"], 4, testbed=bed)
    with pytest.raises(InvalidArgument, match="a link rate cannot be given together with a testbed"):
        run_workers(["true"], 2, "1gbit", testbed=bed)
