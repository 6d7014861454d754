"""The bound: the least time that a training step can take with given bytes on given ports.

It is the length of the longest chain of what has to happen one after the other. The backward pass runs the layers from
the last to the first; a layer's gradient exists when the layer has run backward. Its exchange then takes its bytes of
one direction over the rate of a port. The next forward pass runs the layers from the first to the last. With overlap a
layer waits for its own exchange, is updated and runs; without overlap all updates wait for all exchanges.

No schedule of these bytes beats it on ports that are equally loaded: a port carries one layer's bytes after another, in
each direction, and may stop a layer for a more urgent one at any byte. What a real exchange needs beyond that is left
out: latencies, headers, and the time between a chunk's push and its pull.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from poseidon.models import ModelTable


@dataclass(frozen=True)
class Carried:
    """What a port carries for one layer, in seconds.

    `ready`: when it may begin. `carry`: how long the port needs for it alone. `rest`: what must follow its end.
    """

    ready: float
    carry: float
    rest: float


def least_seconds(items: Sequence[Carried]) -> float:
    """Returns the least time from 0 until the rest of every item has followed, with one port for all of them.

    Any set of items takes at least until its first is ready, plus all their carrying, plus the least rest among them.
    The largest such figure is reached by carrying what has the longest rest first, and by stopping it for an item with
    a longer one (Horn 1974, Carlier 1982: one machine, release times, tails, preemption).
    """
    by_rest = sorted(items, key=lambda item: item.rest, reverse=True)
    least = 0.0
    for ready in {item.ready for item in items}:
        carried = 0.0
        for item in by_rest:
            if item.ready >= ready:
                carried += item.carry
                least = max(least, ready + carried + item.rest)
    return least


def least_step_seconds(
    table: ModelTable,
    compute_seconds: float,
    update_seconds: float,
    carry_seconds: Sequence[float],
    product_seconds: Sequence[float] = (),
    *,
    overlap: bool,
) -> float:
    """Returns the bound of a step in steady state.

    `carry_seconds` has each layer's bytes of one direction over the ports' rate, in forward order. The updates of all
    parameters take `update_seconds` on the accelerator, by their numbers. `product_seconds` has what the accelerator
    takes for each layer's product of received factors, which follows the layer's exchange (none if it is empty). A
    weight that a later layer shares counts to the layer that owns it: that one runs last in backward and first in
    forward.
    """
    durations = table.durations(compute_seconds)
    updates = [update_seconds * layer.parameter_count / table.parameter_count for layer in table.layers]
    ready = sum(backward for _, backward in durations)  # when the gradient exists; that of the first layer comes last
    rest = all_rest = update_seconds + sum(forward for forward, _ in durations)  # from the layer's update on
    products = product_seconds or [0.0] * len(durations)
    compute = ready + all_rest + sum(products)
    items = []
    for (forward, backward), update, carry, product in zip(durations, updates, carry_seconds, products, strict=True):
        if carry > 0:
            items.append(Carried(ready, carry, product + (rest if overlap else all_rest)))
        ready -= backward
        rest -= update + forward
    return max(compute, least_seconds(items))
