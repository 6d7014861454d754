"""Options of benchmark commands that say what the testbed's network does with priorities, and words for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from poseidon.dscp import MOST_CLASSES
from poseidon.options import BY_NAME

PrioritiesOption = Annotated[
    int,
    typer.Option(
        min=1, max=MOST_CLASSES, help="Priority classes of the network's ports, and of methods that do not say theirs."
    ),
]
ThresholdOption = Annotated[
    str,
    typer.Option(
        help="Poseidon's priority_threshold: coarse, a number from 0 to 1, or auto, which every job of a method with "
        "DistributedOptimizer searches before its measured steps."
    ),
]


def network_words(arguments: Mapping[str, Any]) -> str:
    """Says in words which network arguments of `Testbed` make; those that are left out have its defaults."""
    words = []
    if arguments.get("racks", 1) > 1:
        words.append(f"{arguments['racks']} racks, oversubscribed {arguments['oversubscription']:g}:1")
    strict = arguments.get("honour_dscp", False) and arguments.get("priorities", 1) > 1
    words.append("switches honour DSCP" if strict else "FIFO switches")
    if arguments.get("fifo_hosts", False):
        words.append("FIFO host ports")
    if (queue_ms := arguments.get("queue_ms")) is not None:
        words.append(f"queues of {queue_ms:g} ms")
    words.append(arguments.get("congestion", "reno"))
    return ", ".join(words)


def priority_options(priorities: int, threshold: str) -> dict[str, Any]:
    """Returns the options of `poseidon.init` for the options above. Raises InvalidArgument for a bad threshold."""
    threshold = BY_NAME["priority_threshold"].read(threshold, "--threshold")
    return {"priority_classes": priorities, "priority_threshold": threshold}
