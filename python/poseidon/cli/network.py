"""Options of commands that make a testbed: its switches, and the TCP of its hosts."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import typer

from poseidon.cli.optional import OptionalNumber
from poseidon.testbed import CONGESTION_CONTROLS


class Switches(str, Enum):
    """What the switches, or the hosts' own ports, do with the packets' code points."""

    honour = "honour"
    ignore = "ignore"


# Typer wants an enumeration of the words.
Congestion = Enum("Congestion", {name: name for name in CONGESTION_CONTROLS}, type=str)  # type: ignore[misc]
RENO = Congestion("reno")

SwitchesOption = Annotated[
    Switches,
    typer.Option(
        help="Whether the switches honour the packets' code points in strict priority, or ignore them and are plain "
        "FIFO queues."
    ),
]
HostPortsOption = Annotated[
    Switches,
    typer.Option(
        help="The same of the hosts' own ports. Linux's pfifo_fast honours code points; fq_codel, the default of most "
        "distributions, does not."
    ),
]
CongestionOption = Annotated[
    Congestion, typer.Option(help="Congestion control of the hosts' TCP; system: that of this machine.")
]
QueueOption = Annotated[
    OptionalNumber,
    typer.Option(
        metavar="MS",
        help="How long the queue of a switch's port is: what the port sends in so many milliseconds. "
        "Default: 75, at least 1 MiB.",
    ),
]


def network_arguments(
    priorities: int,
    switches: Switches,
    racks: int = 1,
    oversubscription: float = 1.0,
    congestion: Congestion = RENO,
    queue_ms: float | None = None,
    host_ports: Switches = Switches.honour,
) -> dict[str, Any]:
    """Arguments of `Testbed` for the options above."""
    return {
        "priorities": priorities,
        "honour_dscp": switches is Switches.honour,
        "racks": racks,
        "oversubscription": oversubscription,
        "congestion": congestion.value,
        "queue_ms": queue_ms,
        "fifo_hosts": host_ports is Switches.ignore,
    }
