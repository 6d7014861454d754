"""`poseidon testbed`: hosts on one machine with shaped links."""

from __future__ import annotations

from typing import Annotated

import typer

from poseidon import testbed
from poseidon.cli import network
from poseidon.cli.optional import OptionalWhole
from poseidon.cli.output import JsonFlag, print_json, print_line, print_table
from poseidon.dscp import MOST_CLASSES, default_dscp
from poseidon.errors import InvalidArgument
from poseidon.rates import format_rate

app = typer.Typer(
    no_args_is_help=True,
    help="Hosts on one machine, with shaped links (needs root and iproute2).",
    epilog="Example: poseidon testbed up 8 --link 100mbit",
)


@app.command(epilog="Example: poseidon testbed up 8 --link 100mbit --priorities 2 --racks 2 --oversubscription 4")
def up(
    hosts: Annotated[int, typer.Argument(min=1, help="How many hosts.")],
    link: Annotated[str, typer.Option(metavar="RATE", help="Rate of each port and direction.")] = "1gbit",
    mtu: Annotated[int, typer.Option(metavar="BYTES", help="Largest IP packet.")] = 1500,
    ports: Annotated[
        int,
        typer.Option(
            min=1, max=testbed.MOST_PORTS, help="Ports of each host, eth0, eth1, …, each in a subnet of its own."
        ),
    ] = 1,
    priorities: Annotated[
        int,
        typer.Option(
            min=1,
            max=MOST_CLASSES,
            help="Classes that the hosts' ports serve in strict priority, by the packets' code points.",
        ),
    ] = 1,
    switches: network.SwitchesOption = network.Switches.ignore,
    racks: Annotated[int, typer.Option(min=1, help="Racks, each with a switch, over which the hosts are spread.")] = 1,
    oversubscription: Annotated[
        float, typer.Option(min=1, help="The sum of the rates of a rack's hosts over that of its uplink.")
    ] = 1.0,
    congestion: network.CongestionOption = network.RENO,
    queue_ms: network.QueueOption = None,
    host_ports: network.HostPortsOption = network.Switches.honour,
    json: JsonFlag = False,
) -> None:
    """Make a testbed that stays until `poseidon testbed down`."""
    shaped = network.network_arguments(priorities, switches, racks, oversubscription, congestion, queue_ms, host_ports)
    bed = testbed.Testbed(hosts, link, mtu=mtu, persistent=True, ports=ports, **shaped)
    bed.up()
    if json:
        print_json({"id": bed.id, **_description(bed.layout, bed.hosts)})
        return
    each = "" if ports == 1 else f", {ports} ports each"
    print_line(f"Testbed {bed.id}: {len(bed.hosts)} hosts{each}, {bed.link} each way")
    if priorities > 1:
        print_line(f"Priorities: {_priorities(bed.layout)}")
    if racks > 1:
        print_line(f"Racks: {_racks(bed.layout)}")
    print_table(
        ["host", "rack", "address", "namespace"],
        [[host.name, host.rack, " ".join(host.addresses), host.namespace] for host in bed.hosts],
    )
    print_line(f"Run something in a host:  ip netns exec {bed.hosts[0].namespace} COMMAND")
    print_line(f"Remove it:                poseidon testbed down {bed.id}")


def _description(layout: testbed.Layout, hosts: list[testbed.Host]) -> dict[str, object]:
    """The network and its hosts, for machines."""
    return {
        "link": format_rate(layout.bits_per_second),
        "mtu": layout.mtu,
        "ports": layout.port_count,
        "priorities": layout.priorities,
        "switches": _switches(layout).value,
        "racks": layout.racks,
        "oversubscription": layout.oversubscription,
        "congestion": layout.congestion,
        "queue_ms": layout.queue_ms,
        "host_ports": (network.Switches.ignore if layout.fifo_hosts else network.Switches.honour).value,
        "hosts": [
            {
                "host": host.name,
                "rack": host.rack,
                "address": host.address,
                "addresses": list(host.addresses),
                "namespace": host.namespace,
            }
            for host in hosts
        ],
    }


def _switches(layout: testbed.Layout) -> network.Switches:
    return network.Switches.honour if layout.honour_dscp else network.Switches.ignore


def _priorities(layout: testbed.Layout) -> str:
    if layout.priorities == 1:
        return "1"
    marks = ", ".join(map(str, default_dscp(layout.priorities)))
    return f"{layout.priorities} (DSCP {marks}), switches {_switches(layout).value} them"


def _racks(layout: testbed.Layout) -> str:
    return "1" if layout.racks == 1 else f"{layout.racks}, uplinks {layout.oversubscription:g}:1"


@app.command(epilog="Example: poseidon testbed down 0")
def down(
    testbed_id: Annotated[
        OptionalWhole, typer.Argument(metavar="ID", help="Which testbed; not needed when there is one.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all testbeds of this machine.")] = False,
    json: JsonFlag = False,
) -> None:
    """Remove a testbed, with the processes in its hosts; also one that a killed run left."""
    if everything:
        removed = testbed.remove_all()
    else:
        removed = [_the_only_one() if testbed_id is None else testbed_id]
        testbed.remove(removed[0])
    if json:
        print_json({"removed": removed})
    else:
        print_line(f"Removed: {', '.join(map(str, removed))}" if removed else "There is no testbed.")


def _the_only_one() -> int:
    ids = [record.id for record in testbed.records()]
    if len(ids) != 1:
        there = f"there are {len(ids)} testbeds ({', '.join(map(str, ids))})" if ids else "there is no testbed"
        raise InvalidArgument(f"{there}: name one by its ID, or use --all")
    return ids[0]


@app.command(epilog="Example: poseidon testbed status --json")
def status(json: JsonFlag = False) -> None:
    """List the testbeds on this machine."""
    records = testbed.records()
    if json:
        print_json([_status(record) for record in records])
    elif records:
        print_table(
            ["id", "hosts", "ports", "link", "priorities", "racks", "addresses", "owner"],
            [_status_row(record) for record in records],
        )
    else:
        print_line("There is no testbed.")


def _status(record: testbed.Record) -> dict[str, object]:
    hosts = testbed.make_hosts(record.id, record.layout)
    return {
        "id": record.id,
        "host_count": record.layout.host_count,
        "addresses": _addresses(hosts),
        "owner": _owner(record),
        **_description(record.layout, hosts),
    }


def _status_row(record: testbed.Record) -> list[object]:
    layout = record.layout
    addresses = _addresses(testbed.make_hosts(record.id, layout))
    shape = [layout.port_count, format_rate(layout.bits_per_second), _priorities(layout), _racks(layout)]
    return [record.id, layout.host_count, *shape, addresses, _owner(record)]


def _addresses(hosts: list[testbed.Host]) -> str:
    return f"{hosts[0].address} to {hosts[-1].address}"


def _owner(record: testbed.Record) -> str:
    if record.is_stale():
        return "ended without removing it"
    return f"process {record.owner_pid}" if record.owner_pid else "none: stays until removed"
