"""Priorities, racks and oversubscription of the testbed, with real namespaces and traffic. Skipped without root."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from traffic_meter import judges_rates, metered

from poseidon.dscp import default_dscp
from poseidon.errors import InvalidArgument
from poseidon.testbed import Testbed, missing_requirements, network, remove
from waiting import steady, wait_until

missing = missing_requirements()
pytestmark = pytest.mark.skipif(bool(missing), reason="shaped links need " + " and ".join(missing))

RATE = 100_000_000
MARKED = default_dscp(2)[0]
COPIES = 3  # of each class: the shares of single connections in one queue are too uneven to judge by

# Sends datagrams of 500 bytes with each code point of the command line, marked as the family does it.
SENDER = """
import socket, sys
address, family = sys.argv[1], socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
level, option = (socket.IPPROTO_IPV6, socket.IPV6_TCLASS) if ":" in address else (socket.IPPROTO_IP, socket.IP_TOS)
with socket.socket(family, socket.SOCK_DGRAM) as end:
    for code_point in map(int, sys.argv[2:]):
        end.setsockopt(level, option, code_point << 2)
        end.sendto(bytes(500), (address, 9))
"""

_PRINT_CONGESTION = """
print(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(bytes(1)).decode(), end="")
"""
ACCEPTING = f"""
import socket, sys
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    end = server.accept()[0]
{_PRINT_CONGESTION}"""
CONNECTING = f"""
import socket, sys
end = socket.create_connection((sys.argv[1], int(sys.argv[2])))
{_PRINT_CONGESTION}"""


@pytest.fixture(scope="module")
def bed() -> Iterator[Testbed]:
    with Testbed(3, "100mbit", priorities=2, honour_dscp=True) as testbed:
        yield testbed


def contest(bed: Testbed) -> tuple[float, float]:
    """The rate of host 0's marked copies to host 2 beside host 1's unmarked ones, as a fraction of what they get alone.

    Also the bits per second at which host 2's port receives meanwhile.
    """
    byte_count = RATE // 8 // COPIES
    alone = min(bed.copy_rates([(0, 2)] * COPIES, byte_count, [MARKED] * COPIES))
    with metered(bed.hosts[2].namespace, "eth0", 2 * COPIES * byte_count) as totals:
        rates = bed.copy_rates([(1, 2), (0, 2)] * COPIES, byte_count, [0, MARKED] * COPIES)
    return min(rates[1::2]) / alone, totals[0]  # the slowest copy of a kind lasts as long as all of that kind


@judges_rates
def test_a_marked_copy_goes_before_an_unmarked_one(bed: Testbed) -> None:
    share, total = contest(bed)
    assert share >= 0.85
    assert 0.80 * RATE <= total <= 1.03 * RATE  # what the marked ones leave, the unmarked ones get


@judges_rates
def test_switches_that_ignore_marks_share_alike() -> None:
    with Testbed(3, "100mbit", priorities=2) as bed:
        share, total = contest(bed)
    assert 0.35 <= share <= 0.70
    assert 0.80 * RATE <= total <= 1.03 * RATE


@judges_rates
def test_the_hosts_own_port_honours_marks_also_where_switches_do_not() -> None:
    with Testbed(3, "100mbit", priorities=2) as bed:
        alone = bed.copy_rate(0, 1, RATE // 16, MARKED)
        # To different receivers: only the sender's port is shared.
        _, marked = bed.copy_rates([(0, 2), (0, 1)], RATE // 16, [0, MARKED])
    assert marked >= 0.85 * alone


def sent_packets(bed: Testbed) -> list[int]:
    """How many packets each class of host 0's port has sent, the most urgent class first."""
    shown = subprocess.run(
        bed.command(0, ["tc", "-s", "class", "show", "dev", "eth0"]), capture_output=True, text=True, check=True
    )
    counts = dict(re.findall(r"class htb 1:1(\d) .*\n Sent \d+ bytes (\d+) pkt", shown.stdout))
    return [int(counts[name]) for name in sorted(counts)]


@pytest.mark.parametrize("family", [4, 6])
def test_a_packets_class_is_found_by_its_code_point(family: int) -> None:
    with Testbed(2, "100mbit", priorities=3) as bed:
        receiver = bed.hosts[1].address
        if family == 6:
            receiver = "fd77::2"
            for host in range(2):
                command = ["ip", "addr", "add", f"fd77::{host + 1}/64", "dev", "eth0", "nodad"]
                subprocess.run(bed.command(host, command), check=True)
        first, second, last = default_dscp(3)
        code_points = [first] * 3 + [second] * 7 + [last, 26, 12] * 10  # 26 and 12 mark no class of these three
        before = sent_packets(bed)
        argv = [sys.executable, "-c", SENDER, receiver, *map(str, code_points)]
        subprocess.run(bed.command(0, argv), check=True, timeout=20)

        def sent_since() -> list[int]:
            return [after - count for after, count in zip(sent_packets(bed), before, strict=True)]

        wait_until(lambda: sum(sent_since()) >= len(code_points), lambda: f"packets to leave: {sent_since()}")
        sent = sent_since()
    assert sent[:2] == [3, 7]
    assert sent[2] >= 30


@pytest.mark.parametrize("congestion", ["reno", "bbr", "cubic"])
def test_connections_of_both_ends_have_the_congestion_control(congestion: str) -> None:
    with Testbed(2, "100mbit", congestion=congestion) as bed:
        address = bed.hosts[1].address
        accepting = bed.exec(1, [sys.executable, "-c", ACCEPTING, address], stdout=subprocess.PIPE, text=True)
        port = accepting.stdout.readline().strip()
        argv = [sys.executable, "-c", CONNECTING, address, port]
        connecting = subprocess.run(bed.command(0, argv), capture_output=True, text=True, check=True, timeout=20)
        assert [connecting.stdout, accepting.communicate(timeout=20)[0]] == [congestion, congestion]


def received_packets(bed: Testbed) -> int:
    """By host 2."""
    command = ["ip", "-s", "-j", "link", "show", "dev", "eth0"]
    shown = subprocess.run(bed.command(2, command), capture_output=True, text=True, check=True)
    return json.loads(shown.stdout)[0]["stats64"]["rx"]["packets"]  # type: ignore[no-any-return]


@judges_rates
def test_a_switch_drops_what_does_not_fit_its_queue() -> None:
    packets = {}
    for queue_ms in (4.0, 40.0):
        with Testbed(3, "10mbit", queue_ms=queue_ms) as bed:
            argv = [sys.executable, "-c", SENDER, bed.hosts[2].address, *["0"] * 60]
            senders = [bed.exec(host, argv) for host in (0, 1)]
            assert [sender.wait(timeout=20) for sender in senders] == [0, 0]
            packets[queue_ms] = steady(lambda bed=bed: received_packets(bed), pause=0.1)  # one takes 0.4 ms
    assert packets[4.0] < 110  # 60 packets come at twice the port's rate, and the queue has place for 9
    assert packets[40.0] >= 120


@judges_rates
def test_racks_share_their_uplinks() -> None:
    with Testbed(4, "100mbit", racks=2, oversubscription=2) as bed:
        # What rack 0 sends arrives at the core's end of its uplink, what it receives at its own end.
        for device, pairs in (("down0-0", [(0, 2), (1, 3)]), ("up0-0", [(2, 1), (3, 0)])):
            with metered(network.namespace_prefix(bed.id) + "sw", device, RATE // 8) as totals:
                bed.copy_rates(pairs, RATE // 16)
            assert 0.80 * RATE <= totals[0] <= 1.03 * RATE
        within = bed.copy_rates([(0, 1), (1, 0), (2, 3), (3, 2)], RATE // 16)
        assert min(within) >= 0.80 * RATE
        assert max(within) <= 1.03 * RATE


@judges_rates
def test_an_uplink_goes_by_marks() -> None:
    with Testbed(4, "100mbit", priorities=2, honour_dscp=True, racks=2, oversubscription=2) as bed:
        alone = bed.copy_rate(0, 2, RATE // 16, MARKED)
        # Of different senders to different receivers: only the uplink is shared.
        _, marked = bed.copy_rates([(1, 3), (0, 2)], RATE // 16, [0, MARKED])
    assert marked >= 0.85 * alone


def test_each_port_has_racks_of_its_own() -> None:
    with Testbed(2, "100mbit", ports=2, racks=2, oversubscription=2) as bed:
        counters = [f"/sys/class/net/{device}/statistics/rx_bytes" for device in bed.hosts[1].devices]

        def received() -> list[int]:
            shown = subprocess.run(bed.command(1, ["cat", *counters]), capture_output=True, check=True)
            return [int(count) for count in shown.stdout.split()]

        def grown(port: int, address: str) -> list[int]:
            """By how much each port has received more when this one has all that is sent to its address."""
            before = received()

            def growth() -> list[int]:
                return [after - count for after, count in zip(received(), before, strict=True)]

            subprocess.run(bed.command(0, [sys.executable, "-c", SENDER, address, *["0"] * 20]), check=True, timeout=20)
            wait_until(lambda: growth()[port] >= 20 * 500, lambda: f"all to reach port {port}: {growth()}")
            return growth()

        for port, address in enumerate(bed.hosts[1].addresses):
            assert grown(port, address)[1 - port] < 20 * 500


@pytest.mark.parametrize(("dscp", "message"), [([46], "1 code points were given for 2 copies"), ([0, 64], "0, 64")])
def test_copies_with_wrong_marks(bed: Testbed, dscp: list[int], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        bed.copy_rates([(0, 1), (1, 2)], 1, dscp)


def poseidon(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "poseidon", "testbed", *arguments]
    wide = {**os.environ, "COLUMNS": "160"}  # pytest's readline tells children the width of a terminal
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env=wide)


def test_commands_show_racks_and_priorities() -> None:
    options = [
        "--priorities",
        "3",
        "--racks",
        "2",
        "--oversubscription",
        "2.5",
        "--congestion",
        "bbr",
        "--queue-ms",
        "20",
    ]
    done = poseidon("up", "4", "--link", "100mbit", *options)
    testbed_id = int(re.match(r"Testbed (\d+): 4 hosts, 100mbit each way", done.stdout)[1])
    try:
        assert "Priorities: 3 (DSCP 46, 34, 0), switches ignore them\nRacks: 2, uplinks 2.5:1\n" in done.stdout
        (entry,) = [entry for entry in json.loads(poseidon("status", "--json").stdout) if entry["id"] == testbed_id]
        network = [
            entry[name] for name in ("priorities", "switches", "racks", "oversubscription", "congestion", "queue_ms")
        ]
        assert network == [3, "ignore", 2, 2.5, "bbr", 20]
        assert [host["rack"] for host in entry["hosts"]] == [0, 0, 1, 1]
        assert "2, uplinks 2.5:1" in poseidon("status").stdout
    finally:
        remove(testbed_id)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--racks", "3"], "2 hosts cannot stand in 3 racks"),
        (["--oversubscription", "2"], "one rack has no uplink"),
        (["--racks", "2", "--oversubscription", "0.5"], "--oversubscription"),
        (["--priorities", "9"], "--priorities"),
        (["--switches", "maybe"], "--switches"),
        (["--congestion", "vegas"], "--congestion"),
        (["--queue-ms", "0"], "a queue of 0 ms cannot be made"),
    ],
)
def test_wrong_options(options: list[str], message: str) -> None:
    done = poseidon("up", "2", *options)
    assert done.returncode != 0
    assert message in done.stderr
