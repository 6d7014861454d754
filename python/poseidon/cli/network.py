"""Options of commands that make a testbed: what its network does with priorities."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import typer


class Switches(str, Enum):
    """What the switches do with the packets' code points."""

    honour = "honour"
    ignore = "ignore"


SwitchesOption = Annotated[
    Switches, typer.Option(help="Whether the switches honour the packets' code points; the hosts' ports always do.")
]


def network_arguments(
    priorities: int, switches: Switches, racks: int = 1, oversubscription: float = 1.0
) -> dict[str, Any]:
    """Arguments of `Testbed` for the options above."""
    return {
        "priorities": priorities,
        "honour_dscp": switches is Switches.honour,
        "racks": racks,
        "oversubscription": oversubscription,
    }
