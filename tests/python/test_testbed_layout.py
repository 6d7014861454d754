"""Layouts of testbeds and the shapes of their ports. Makes no network."""

from __future__ import annotations

from typing import Any

import pytest

from poseidon.dscp import MOST_CLASSES, default_dscp
from poseidon.errors import InvalidArgument
from poseidon.testbed import Layout, Record, Testbed, make_hosts
from poseidon.testbed.shaping import Shape

RATE = 100_000_000


def test_hosts_stand_in_racks_in_blocks() -> None:
    layout = Layout(5, RATE, racks=2, oversubscription=2)
    assert [layout.rack_of(host) for host in range(5)] == [0, 0, 0, 1, 1]
    assert [layout.uplink_bits_per_second(rack) for rack in range(2)] == [1.5 * RATE, RATE]
    assert [host.rack for host in make_hosts(7, layout)] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize(("hosts", "racks"), [(8, 8), (7, 3), (10, 4), (3, 1)])
def test_racks_are_even(hosts: int, racks: int) -> None:
    layout = Layout(hosts, RATE, racks=racks)
    places = [layout.rack_of(host) for host in range(hosts)]
    sizes = [places.count(rack) for rack in range(racks)]
    assert places == sorted(places)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"racks": 0}, "4 hosts cannot stand in 0 racks: there must be 1 to 4"),
        ({"racks": 5}, "4 hosts cannot stand in 5 racks: there must be 1 to 4"),
        ({"racks": 2, "oversubscription": 0.5}, "oversubscription is 0.5: it must be 1 or more"),
        ({"racks": 2, "oversubscription": float("nan")}, "oversubscription is nan: it must be 1 or more"),
        ({"congestion": "vegas"}, "the congestion control is 'vegas': it must be one of reno, bbr, cubic, system"),
        ({"queue_ms": 0.0}, "a queue of 0 ms cannot be made"),
        ({"queue_ms": float("nan")}, "a queue of nan ms cannot be made"),
        ({"oversubscription": 2}, "one rack has no uplink"),
        ({"racks": 2, "oversubscription": float("inf")}, "uplinks of 0bit to 0bit cannot be made"),
        ({"racks": 2, "link": "100gbit"}, "uplinks of 200gbit to 200gbit cannot be made"),
        ({"priorities": 0}, "ports with 0 priorities cannot be made: they must have 1 to 8"),
        ({"priorities": MOST_CLASSES + 1}, "ports with 9 priorities cannot be made: they must have 1 to 8"),
    ],
)
def test_layouts_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Testbed(4, **arguments)


def test_switches_that_ignore_marks_have_one_class() -> None:
    honour, ignore = (
        Layout(4, RATE, priorities=3, honour_dscp=honours, racks=2, oversubscription=4) for honours in (True, False)
    )
    assert honour.host_shape == honour.switch_shape == ignore.host_shape == Shape(RATE, 1500, 3)
    assert honour.uplink_shape(0) == Shape(RATE // 2, 1500, 3)
    assert ignore.switch_shape == Shape(RATE)
    assert ignore.uplink_shape(0) == Shape(RATE // 2)


def test_queues_of_switches_are_as_long_as_asked_for() -> None:
    layout = Layout(4, RATE, racks=2, oversubscription=4, queue_ms=20)
    assert layout.switch_shape.queue_bytes == RATE // 8 // 50
    assert layout.uplink_shape(0).queue_bytes == RATE // 2 // 8 // 50
    assert layout.host_shape.queue_bytes == Shape(RATE).queue_bytes == 1 << 20


def test_hosts_that_ignore_marks_have_one_queue_as_long_as_a_switchs() -> None:
    layout = Layout(4, RATE, priorities=2, honour_dscp=True, queue_ms=20, fifo_hosts=True)
    assert layout.host_shape == Shape(RATE, 1500, 1, 0.02)
    assert layout.switch_shape == Shape(RATE, 1500, 2, 0.02)


def test_bundles_of_packets_fit_the_slowest_link() -> None:
    assert Layout(4, RATE).segment_bytes == Shape(RATE).segment_bytes == 12_500
    assert Layout(4, RATE, racks=2).segment_bytes == 12_500
    assert Layout(4, RATE, racks=2, oversubscription=4).segment_bytes == 6_250


@pytest.mark.parametrize("priorities", range(2, MOST_CLASSES + 1))
def test_each_code_point_has_a_class_and_the_guarantees_are_small(priorities: int) -> None:
    lines = Shape(RATE, priorities=priorities).commands("eth0")
    leaves = [line.split() for line in lines if "parent 1:1 classid" in line]
    assert [words[words.index("prio") + 1] for words in leaves] == [str(index) for index in range(priorities)]
    guaranteed = sum(int(words[words.index("rate") + 1].removesuffix("bit")) for words in leaves)
    assert guaranteed <= 0.01 * RATE
    classes = [words[words.index("classid") + 1] for words in leaves]
    expected = [
        f"u32 match {field} {code_point * 4:#04x} 0xfc flowid {name}"
        for field in ("ip dsfield", "ip6 priority")
        for code_point, name in zip(default_dscp(priorities)[:-1], classes[:-1], strict=True)
    ]
    assert [line[line.index("u32") :] for line in lines if line.startswith("filter")] == expected
    assert lines[0].endswith(f"default {classes[-1].removeprefix('1:')}")


def test_one_priority_needs_no_filters() -> None:
    lines = Shape(RATE).commands("eth0")
    assert len(lines) == 3
    assert not any("filter" in line for line in lines)


def test_a_record_gives_its_layout_back() -> None:
    record = Record(3, Layout(6, 31_250_000, 9000, 2, 4, False, 3, 2.5), 1, 1)
    assert Record.of_file(record.file_text()) == record
    assert '"link": "31.25mbit"' in record.file_text()


def test_a_record_from_before_there_were_racks_and_priorities() -> None:
    old = '{"id": 0, "host_count": 2, "link": "1gbit", "mtu": 1500, "owner_pid": 0, "owner_start": 0, "port_count": 2}'
    assert Record.of_file(old).layout == Layout(2, 10**9, port_count=2)
