"""The compute of one worker in a simulated step: backward, products of factors, and the next forward pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from poseidon.planner.clock import BACKWARD, FORWARD, PRODUCT, Activity, Clock
from poseidon.planner.layers import Exchange
from poseidon.planner.load import Load


@dataclass(frozen=True)
class Durations:
    """What each layer takes, in forward order, and who multiplies factors.

    `products_per_s` multiply-adds per second are made by the accelerator, between two layers, or by a processor of its
    own if `on_accelerator` is False.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    update_s: Sequence[float]
    products_per_s: float
    on_accelerator: bool

    def slowed(self, times: float) -> Durations:
        """Those of a worker that takes so many times as long for its layers and products."""
        return Durations(
            [seconds * times for seconds in self.forward_s],
            [seconds * times for seconds in self.backward_s],
            [seconds * times for seconds in self.update_s],
            self.products_per_s / times,
            self.on_accelerator,
        )


class Worker:
    """One worker's step: from the begin of its backward pass, at time 0, to the end of the next forward pass.

    `start(index)` is called when a unit's gradient exists, or at the end of the backward pass if the exchange's
    schedule is sequential. Call `arrived` when its result, or its last part, is there. Afterwards `completed_s` has the
    time at which each unit's mean was there, and `exposed_s` how long the accelerator waited for it alone, or for it as
    the last one.
    """

    def __init__(
        self,
        clock: Clock,
        durations: Durations,
        loads: Sequence[Load],
        exchange: Exchange,
        start: Callable[[int], None],
        name: str = "",
    ) -> None:
        """`name` is that of the worker; empty: it stands for all."""
        of_worker = f" of {name}" if name else ""
        self._accelerator, self._processor = f"accelerator{of_worker}", f"processor{of_worker}"
        self._clock, self._durations, self._loads = clock, durations, loads
        self._overlap, self._sequential, self._start = exchange.overlap, exchange.schedule == "sequential", start
        self._layer = len(durations.backward_s)  # that ran backward last
        self._next_forward = 0
        self._products: deque[int] = deque()
        self._busy = self._multiplying = False
        self._idle_since: float | None = None  # of an accelerator that waits for exchanges
        self._ready: dict[int, list[int]] = {}  # units by the layer after whose backward pass they start
        self._waited: dict[int, set[int]] = {}  # units by the layer that needs them in forward
        for index, load in enumerate(loads):
            self._ready.setdefault(0 if self._sequential else min(load.unit.places), []).append(index)
            for place in self._needed_by(index):
                self._waited.setdefault(place, set()).add(index)
        self.completed_s = [0.0] * len(loads)
        self.exposed_s = [0.0] * len(loads)
        self.ran: list[Activity] = []

    @property
    def end_s(self) -> float:
        """When the step ended."""
        return self.ran[-1].end_s

    def begin(self) -> None:
        """Begins the backward pass now."""
        self._advance()

    def arrived(self, index: int) -> None:
        """The unit has arrived; its product is still to be made, if it has one."""
        if not self._loads[index].worker_products:
            self._complete(index)
            return
        self._products.append(index)
        if self._durations.on_accelerator:
            self._advance()
        else:
            self._multiply()

    def _needed_by(self, index: int) -> Sequence[int]:
        """The layers whose forward pass waits for a unit. Without overlap all wait for all."""
        return self._loads[index].unit.places if self._overlap else (0,)

    def _multiply(self) -> None:
        """The processor beside the accelerator makes one product after another."""
        if self._multiplying or not self._products:
            return
        self._multiplying = True
        index = self._products[0]
        self._clock.spend(self._product_s(index), self._processor, PRODUCT, index, self._multiplied)

    def _multiplied(self) -> None:
        self._multiplying = False
        self._note()
        self._complete(self._products.popleft())
        self._multiply()

    def _note(self) -> None:
        assert self._clock.ended is not None
        self.ran.append(self._clock.ended)

    def _product_s(self, index: int) -> float:
        return self._loads[index].worker_products / self._durations.products_per_s

    def _complete(self, index: int) -> None:
        self.completed_s[index] = self._clock.now
        if self._idle_since is not None and index in self._waited[self._next_forward]:
            self.exposed_s[index] += self._clock.now - self._idle_since
            self._idle_since = self._clock.now
        for place in self._needed_by(index):
            self._waited[place].discard(index)
        self._advance()

    def _advance(self) -> None:
        """Gives the accelerator its next work, if it is idle and has some: a product, else a layer."""
        if self._busy:
            return
        durations = self._durations
        if durations.on_accelerator and self._products:
            index = self._products.popleft()
            self._run(PRODUCT, index, self._product_s(index))
        elif self._layer > 0:
            self._layer -= 1
            self._run(BACKWARD, self._layer, durations.backward_s[self._layer])
        elif self._next_forward < len(durations.forward_s):
            self._advance_forward()

    def _advance_forward(self) -> None:
        layer, durations = self._next_forward, self._durations
        if self._waited.get(layer):
            if self._idle_since is None:
                self._idle_since = self._clock.now
            return
        self._idle_since = None
        self._next_forward += 1
        update_s = durations.update_s[layer] if self._overlap else (0.0 if layer else sum(durations.update_s))
        self._run(FORWARD, layer, update_s + durations.forward_s[layer])

    def _run(self, what: str, of: int, seconds: float) -> None:
        self._busy = True
        self._clock.spend(seconds, self._accelerator, what, of, self._ended, what, of)

    def _ended(self, what: str, of: int) -> None:
        self._busy = False
        self._note()
        if what == PRODUCT:
            self._complete(of)
        elif what == BACKWARD:
            for index in self._ready.get(of, ()):
                self._start(index)
        self._advance()
