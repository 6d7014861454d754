"""What is known of one backward pass that exchanges gradients."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from poseidon.torch.exchange.pending_exchange import PendingExchange
from poseidon.torch.model.parameters import SyncedParameter


@dataclass(eq=False)
class BackwardRun:
    """One synchronizing backward pass. Times are of the monotonic clock."""

    begin_ns: int
    forward_begin_ns: int
    missed: bool = False  # made without backward: this rank is in none of its means
    exchanges: dict[SyncedParameter, PendingExchange] = field(default_factory=dict)
    started: list[SyncedParameter] = field(default_factory=list)
    ready_ns: dict[SyncedParameter, int] = field(default_factory=dict)  # when each that was reached got its gradient
    again: dict[SyncedParameter, int] = field(default_factory=dict)  # how often each got a further one
    end_ns: int = 0
    waited_ns: int = 0  # for results
    dropped: Any = None  # what tells that backward has failed
    compiled: bool = False  # by torch's compiled autograd

    def note_gradient(self, entry: SyncedParameter, now_ns: int) -> None:
        """The parameter has got a gradient."""
        if entry in self.ready_ns:
            self.again[entry] = self.again.get(entry, 0) + 1
        self.ready_ns[entry] = now_ns

    def fires(self, entry: SyncedParameter) -> int:
        """How often the parameter has got a gradient."""
        return (entry in self.ready_ns) + self.again.get(entry, 0)

    def recorded(self) -> Iterator[tuple[SyncedParameter, int]]:
        """The parameters in the order in which their exchanges were started, and when each gradient was complete."""
        return ((entry, self.ready_ns.get(entry, self.end_ns)) for entry in self.started)

    def in_progress(self) -> list[PendingExchange]:
        """The exchanges that are not over."""
        return [pending for pending in self.exchanges.values() if not pending.over]

    def can_wait_for(self, entry: SyncedParameter, entries: Iterable[SyncedParameter]) -> bool:
        """Whether a hook may wait for this exchange, which is one of the run's. `entries`: all of the model."""
        # Of what travels together nothing is sent until all is there. Other threads must not wait beside autograd's.
        complete = all(other in self.exchanges for other in entries if other.unit == entry.unit)
        return complete and torch._C._current_graph_task_id() >= 0

    def uncover(self) -> None:
        """The run has failed: nothing is to stand in `.grad` any more."""
        for pending in self.exchanges.values():
            pending.uncover()

    def lacks(self, entries: Sequence[SyncedParameter]) -> str:
        """What a compiled backward pass has left out, as part of a message; otherwise empty."""
        missing = [entry.name for entry in entries if entry not in self.ready_ns]
        if not self.compiled or not missing:
            return ""
        return (
            f". With compiled autograd it has to reach every parameter, and {len(missing)} were left out, "
            f"{missing[0]} first: freeze them, or set torch._dynamo.config.compiled_autograd to False"
        )


class Failable(Protocol):
    """What is told of backward passes that have failed."""

    def backward_failed(self, run: BackwardRun) -> None:
        """It has raised in the middle of `run`."""


def tell_dropped(target: weakref.ref[Failable], run: weakref.ref[BackwardRun]) -> None:
    """Autograd has dropped what `run` waits for: its backward pass has failed."""
    told, failed = target(), run()
    if told is not None and failed is not None:
        told.backward_failed(failed)
