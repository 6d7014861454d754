"""The backward passes of one model that exchange gradients: when they end, and how their exchanges do.

For autograd the end of a backward pass may be inside another one. A re-entrant checkpoint, or any function that calls
backward() in its own backward, runs a graph task inside that of the program's backward(). Autograd calls the callbacks
of a graph task at its end, also of such an inner one.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from poseidon import _core
from poseidon.errors import PoseidonError
from poseidon.torch.exchange.pending_exchange import PendingExchange, changed_meanwhile
from poseidon.torch.exchange.transfer import Transfer
from poseidon.torch.model.parameters import SyncedParameter
from poseidon.torch.tensors.compatibility import increment_version


def in_compiled_backward() -> bool:
    """Whether torch's compiled autograd runs hooks now. It calls no callbacks at the end."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(compiled, "in_compiled_autograd_region", False))


class BackwardEnd:
    """Calls `finish` once, at the end of the outermost backward pass that runs now.

    `began_in` is the node of the graph inside which that pass has begun, for autograd; None: outside of all.
    `postponed` is called at the end of each inner one. Autograd drops the object uncalled when backward fails.
    """

    def __init__(self, finish: Callable[[], None], began_in: Any, postponed: Callable[[], None]) -> None:
        self._finish = finish
        self._began_in = began_in
        self._postponed = postponed

    def await_end(self) -> None:
        """Waits for the end of the graph task that runs now."""
        torch.autograd.Variable._execution_engine.queue_callback(self)  # type: ignore[attr-defined]

    @torch._disable_dynamo
    def __call__(self) -> None:
        # The node that has called this inner backward; none at the end of the outermost.
        around = torch._C._current_autograd_node()
        if around is None or around is self._began_in:
            self._finish()
            return
        self._postponed()
        # Only code that runs in the outer graph task can reach it; the nodes that follow do, each of them.
        handles: list[Any] = []
        for node, _ in around.next_functions:
            if node is not None:
                handles.append(node.register_prehook(partial(_await_outer_end, self, handles)))


@torch._disable_dynamo
def _await_outer_end(end: BackwardEnd, handles: list[Any], *_: Any) -> None:
    for handle in handles:
        handle.remove()
    end.await_end()


_RUN = getattr(getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None)


def caller_of_backward() -> int:
    """The `threading.get_ident()` of the thread for whose backward() the present one works.

    Backward on a GPU, and a backward inside some sixty others, runs in a thread of autograd's. The thread that has
    called backward() waits for it.

    0 if that is the present one itself, or if it is not known: there are several, or it is no Python thread.
    """
    if not isinstance(threading.current_thread(), threading._DummyThread):
        return 0  # Python has made this thread, or it is the main thread
    own = threading.get_ident()
    waiting = [ident for ident, top in sys._current_frames().items() if ident != own and top.f_code is _RUN]
    return waiting[0] if len(waiting) == 1 else 0


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


class Runs:
    """One model's backward passes: the one that runs, if any, and the one that is over but for exchanges in flight.

    It waits for results, and knows whether they can still come. `entries` are all parameters of the model. It exchanges
    nothing before `connect`.
    """

    _client: _core.Client
    _transfer: Transfer

    def __init__(self, entries: Sequence[SyncedParameter]) -> None:
        self.current: BackwardRun | None = None
        self.last: BackwardRun | None = None  # that is over, and all its exchanges
        self.on_over: list[Callable[[BackwardRun], None]] = []  # what is told of each such one, in this order
        self._entries = entries
        self._flying: BackwardRun | None = None
        self._broken: str | None = None

    def connect(self, client: _core.Client, transfer: Transfer) -> None:
        """Exchanges go by these from now on."""
        self._client, self._transfer, self.last = client, transfer, None

    def drop(self) -> None:
        """Drops what is under way, after the client has failed."""
        if self.current is not None:
            self.current.uncover()
        self.current = self._flying = self._broken = None

    def check_usable(self) -> None:
        """Raises PoseidonError if an earlier backward, or the updates after it, failed half way."""
        if self._broken is not None:
            self._client.abort(self._broken)
            raise PoseidonError(f"{self._broken}; end all workers and start again from a checkpoint")

    def fail(self, run: BackwardRun) -> None:
        """Backward raised in the middle of `run`, the current one: the ranks do not agree on what was exchanged."""
        self.current = None
        run.uncover()
        self._broken = f"rank {self._client.rank}: an earlier backward pass failed after its exchange had started"
        self._broken += run.lacks(self._entries)

    def half_landed(self) -> None:
        """Some parameters have made the step, and some will not."""
        self._broken = (
            f"rank {self._client.rank}: the exchange of gradients or the update after a backward pass failed, so that "
            "some parameters have made the step and some have not"
        )

    def end(self, run: BackwardRun) -> None:
        """`run`, the current one, is over but for exchanges in flight, whose end `all_landed` tells."""
        self.current, self._flying = None, run

    def all_landed(self) -> None:
        """Nothing is in flight any more."""
        run, self._flying = self._flying, None
        self.last = run
        if run is not None:
            for tell in self.on_over:
                tell(run)

    def done(self, pending: PendingExchange) -> bool:
        """Whether `deliver` would not wait for it."""
        return self._transfer.done(pending.entry.layer)

    def deliver(self, exchanges: Sequence[PendingExchange]) -> None:
        """Waits for results and puts them where they belong."""
        for pending in exchanges:
            pending.check_untouched()
        since_ns = time.monotonic_ns()
        self._transfer.wait([pending.entry.layer for pending in exchanges])
        run = self.current or self._flying
        if run is not None:
            run.waited_ns += time.monotonic_ns() - since_ns
        # Autograd has to know that these have changed; one call for all, since each is slow.
        increment_version([pending.overwritten for pending in exchanges if pending.overwritten is not None])
        for pending in exchanges:
            pending.arrive(self._client.layer_stats(pending.entry.layer), self._transfer)

    def land_in_backward(self, pending: PendingExchange) -> None:
        """A hook of the program's uses the gradient, whose exchange is one of the backward that runs now."""
        self.check_usable()
        run, entry = self.current, pending.entry
        # What is written to a gradient that servers have got has no effect.
        if run is None or entry.on_servers or not run.can_wait_for(entry, self._entries):
            raise changed_meanwhile(entry, "used")
        pending.uncover()
        self.deliver([pending])
