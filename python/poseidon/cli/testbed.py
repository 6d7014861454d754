"""`poseidon testbed`: hosts on one machine with shaped links."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from poseidon import testbed
from poseidon.cli.output import JsonFlag, print_json, print_line, print_table
from poseidon.errors import InvalidArgument

app = typer.Typer(no_args_is_help=True, help="Hosts on one machine, with shaped links (needs root and iproute2).")


def _host_rows(hosts: list[testbed.Host]) -> list[dict[str, object]]:
    return [
        {"host": host.name, "address": host.address, "addresses": list(host.addresses), "namespace": host.namespace}
        for host in hosts
    ]


@app.command(epilog="Example: poseidon testbed up 8 --link 100mbit")
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
    json: JsonFlag = False,
) -> None:
    """Make a testbed that stays until `poseidon testbed down`."""
    bed = testbed.Testbed(hosts, link, mtu=mtu, persistent=True, ports=ports)
    bed.up()
    rows = _host_rows(bed.hosts)
    if json:
        print_json({"id": bed.id, "link": bed.link, "mtu": mtu, "ports": ports, "hosts": rows})
        return
    each = "" if ports == 1 else f", {ports} ports each"
    print_line(f"Testbed {bed.id}: {len(rows)} hosts{each}, {bed.link} each way")
    print_table(
        ["host", "address", "namespace"], [[host.name, " ".join(host.addresses), host.namespace] for host in bed.hosts]
    )
    print_line(f"Run something in a host:  ip netns exec {bed.hosts[0].namespace} COMMAND")
    print_line(f"Remove it:                poseidon testbed down {bed.id}")


@app.command(epilog="Example: poseidon testbed down 0")
def down(
    testbed_id: Annotated[
        Optional[int],  # noqa: UP045
        typer.Argument(metavar="ID", help="Which testbed; not needed when there is one."),
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
        columns = ["id", "host_count", "ports", "link", "addresses", "owner"]
        print_table(columns, [[_status(record)[column] for column in columns] for record in records])
    else:
        print_line("There is no testbed.")


def _status(record: testbed.Record) -> dict[str, object]:
    hosts = testbed.make_hosts(record.id, record.host_count, record.port_count)
    owner = f"process {record.owner_pid}" if record.owner_pid else "none: stays until removed"
    return {
        "id": record.id,
        "host_count": record.host_count,
        "link": record.link,
        "addresses": f"{hosts[0].address} to {hosts[-1].address}",
        "owner": "ended without removing it" if record.is_stale() else owner,
        "mtu": record.mtu,
        "ports": record.port_count,
        "hosts": _host_rows(hosts),
    }
