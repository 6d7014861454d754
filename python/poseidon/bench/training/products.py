"""The products of received factors, as work of the accelerator.

With sfb every worker multiplies the factors of all workers (P·K rows) into the gradient. In reality the accelerator
does that, between two layers. In a replay a processor does it, beside layers that sleep, so it would cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from poseidon.schemes import workers_multiply


class Product(NamedTuple):
    """One layer's product: when its last factors had arrived (monotonic, in seconds), and what it takes."""

    arrived: float
    seconds: float


class _Layer(NamedTuple):
    number: int  # the client's
    row_seconds: float  # that the accelerator takes for the product of one row of factors
    own_rows: int  # of one worker's batch


class Products:
    """What the accelerator has to multiply for the layers whose exchanges have ended.

    A row of the layer's own batch takes `forward_seconds / K` in the forward pass, which is M·N multiply-adds. A row of
    factors takes as many, at the same rate. The layer's backward pass keeps its whole duration, although it leaves out
    the product of its own rows. So these are not charged again.
    """

    def __init__(self, client: Any, layers: Sequence[tuple[int, float, int]]) -> None:
        """`layers` has each factorable layer's number in the client, what one row takes, and the rows of a batch."""
        self._client = client
        self._layers = [_Layer(*layer) for layer in layers]
        self._steps = [client.layer_stats(layer.number).step for layer in self._layers]

    def arrived(self) -> list[Product]:
        """The products of exchanges that have ended since the last call, in the order of their arrival."""
        found = []
        for place, layer in enumerate(self._layers):
            stats = self._client.layer_stats(layer.number)
            if stats.step == self._steps[place]:
                continue
            self._steps[place] = stats.step
            if workers_multiply(stats.scheme):
                arrived_ns = stats.completed_ns - stats.compute_ns  # the processor's own product came after it
                received_rows = stats.factor_count - layer.own_rows
                found.append(Product(arrived_ns / 1e9, received_rows * layer.row_seconds))
        return sorted(found)
