"""Exchanges that outlive their backward pass, and the updates that wait for them.

Code that needs a gradient, or after step() a parameter, first waits for it alone. Uses of parameters are reported
(`watched.py`). A use that was not seen is found when a gradient comes for a parameter that is `overtaken`.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from poseidon.adapter.priorities import Priorities
from poseidon.errors import PoseidonError
from poseidon.torch.exchange.pending_exchange import PendingExchange, PendingUpdates
from poseidon.torch.exchange.runs import Runs
from poseidon.torch.model.parameters import SyncedParameter
from poseidon.torch.tensors.compatibility import call_before_compiling, increment_version
from poseidon.torch.tensors.modes import update_mode
from poseidon.torch.tensors.ownership import is_held, reachable, storage_of
from poseidon.torch.tensors.pending_gradient import PendingGradient
from poseidon.torch.tensors.shard import Shard
from poseidon.torch.tensors.watched import Watched, Watcher, unnoticed, unwatch, watch, without_torch_function


class Flights(Watcher):
    """The exchanges of one model that its backward has not waited for; the watcher of their parameters.

    A parameter is *overtaken* if something that may use it, as a rule a forward pass, began before its update was made,
    and no use of it has been seen since. It stays watched, also if its update has been made for others of its group. If
    a gradient comes for it, it was used without being seen, perhaps with its old values.
    """

    def __init__(self, entries: Sequence[SyncedParameter], runs: Runs, listener: Callable[[], object]) -> None:
        """`runs` ends exchanges. `listener` hears of backward passes, as long as exchanges are in flight, too."""
        self.priorities: Priorities | None = None  # of a model with updates on the workers
        self._entries, self._runs, self._listener = entries, runs, listener
        self._exchanges: dict[SyncedParameter, PendingExchange] = {}
        self._units: dict[tuple[int, int], list[PendingExchange]] = {}  # that arrive together
        self.overtaken: dict[SyncedParameter, bool] = {}  # whether it is known to be by a forward pass
        self._all_overtaken = False  # those whose update is due are in it
        self._told_exposed = False
        self.is_compiled = False  # code of the model's is, so that its uses of parameters are not seen
        self._trainer = threading.current_thread()  # the thread that trains

    def in_flight(self, entry: SyncedParameter) -> PendingExchange | None:
        """The parameter's exchange, if it is in flight."""
        return self._exchanges.get(entry)

    def note_thread(self) -> None:
        """The present thread is the one that trains."""
        self._trainer = threading.current_thread()

    def is_trainer(self) -> bool:
        """Whether the present thread is that one."""
        return threading.get_ident() == self._trainer.ident

    def _check_thread(self) -> None:
        """PoseidonError in a thread that may use the model at the same time as the one that trains."""
        if self.is_trainer() or not self._exchanges or not self._trainer.is_alive():
            return
        if torch._C._current_graph_task_id() < 0:  # otherwise it is a thread in which autograd runs backward
            raise PoseidonError(
                "another thread than the one that trains uses parameters or gradients while updates are in flight: "
                "call state_dict() in the thread that trains, and hand copies of its tensors to the other, or call "
                "synchronize() of the DistributedOptimizer and let the training wait for the other thread"
            )

    def due(self) -> list[SyncedParameter]:
        """The parameters whose update is still to be made."""
        return [entry for entry, pending in self._exchanges.items() if pending.step is not None]

    def pending_updates(self) -> dict[torch.Tensor, int]:
        """The parameters whose update is still to be made, and the attempt in which step() was called."""
        return {
            entry.whole: pending.step.attempt for entry, pending in self._exchanges.items() if pending.step is not None
        }

    def drop(self) -> None:
        """Drops what is in flight."""
        for entry, pending in self._exchanges.items():
            if pending.stand_in is not None and pending.kept:
                entry.param.grad = None
            pending.stand_in = None  # what stands in refers to it
        for entry in [*self._exchanges, *self.overtaken]:
            unwatch(entry.whole)
        self._exchanges, self._units, self.overtaken = {}, {}, {}
        _FLYING.pop(self, None)

    def land_others(self) -> None:
        """Ends the flights of other models that wait for nothing any more; of dropped ones nobody else would."""
        for other in [one for one in _FLYING if one is not self]:
            if other._trainer is self._trainer and all(map(other._runs.done, other._exchanges.values())):
                with suppress(PoseidonError):  # theirs, if anybody's
                    other.settle()
                _FLYING.pop(other, None)

    # Of one exchange, in the order of its life.

    def take_off(self, pending: PendingExchange) -> None:
        """Backward is over and the exchange is not."""
        entry = pending.entry
        _FLYING[self] = self._listener()
        self._exchanges[entry] = pending
        self._units.setdefault(entry.unit, []).append(pending)
        if pending.absent or pending.update_is_due:  # whether there will be a gradient is not known yet, or what it is
            if pending.update_is_due:
                self._all_overtaken = False
            watch(entry.whole, self, entry)
            return
        if pending.stand_in is None:
            self.cover(pending)

    def cover(self, pending: PendingExchange) -> None:
        """Whoever uses the gradient from now on waits for the exchange, unless it is over."""
        reference, entry = weakref.ref(self), pending.entry

        def resolve(_: PendingGradient) -> torch.Tensor:
            flights = reference()
            if flights is not None and not pending.over:
                if flights.in_flight(entry) is pending:
                    flights.settle([entry])
                else:
                    flights.land_in_backward(pending)
            return pending.gradient()

        pending.stand_aside(PendingGradient.make(entry.param, resolve, pending.zero_later, entry.form.is_sparse))

    def land_in_backward(self, pending: PendingExchange) -> None:
        """A hook of the program's uses the gradient, whose exchange is one of the backward that runs now."""
        self._runs.land_in_backward(pending)

    def postpone(self, exchanges: Sequence[PendingExchange], step: PendingUpdates) -> None:
        """Notes that step() has been called: these updates are due, and made when their gradients are in."""
        self.note_thread()
        # What still needs the parameters as they were must fail, as after a step() that does not wait.
        increment_version([pending.entry.param for pending in exchanges])
        self._all_overtaken = False
        for pending in exchanges:
            pending.step = step
            watch(pending.entry.whole, self, pending.entry)
        self.settle_exposed([pending.entry for pending in exchanges])

    def settle_exposed(self, entries: Sequence[SyncedParameter]) -> None:
        """Waits for the updates of those parameters that the program can use unseen: past them, in their memory."""
        if not entries:
            return
        if self.is_compiled:  # the guards of compiled code would fail wherever it is given a watched parameter
            self.settle(entries)
            return
        with without_torch_function():
            own = Counter[int]()  # holders that are exchanges
            for entry, pending in self._exchanges.items():
                own[storage_of(entry.param)] += pending.holders_of_parameter
            params = [entry.param for entry in entries if not isinstance(entry.param, Shard)]
            shared = set(reachable(params, (entry.param for entry in self._entries), own))
            shared.update(filter(is_held, params))
            shared.update(
                entry.param for entry in entries if isinstance(entry.param, Shard) and entry.param.is_exposed()
            )
            exposed = [entry for entry in entries if entry.param in shared or not entry.lies_in_own_memory()]
        if not exposed:
            return
        if not self._told_exposed:
            self._told_exposed = True
            warnings.warn(
                f"{len(exposed)} of {len(entries)} parameters, such as {exposed[0].name}, are waited for before the "
                "next forward pass: other tensors share their memory, others than PyTorch have allocated it (NumPy, "
                "torch.load), or others than Python hold them (a program of torch.jit's, a kept graph), so that they "
                "might be used unseen; `param.data = param.data.clone()` before the model is wrapped gives a parameter "
                "memory of its own",
                stacklevel=4,
            )
        self.settle(exposed)

    def settle(self, entries: Iterable[SyncedParameter] | None = None) -> None:
        """Waits until the gradients of these parameters (None: all) are in place, and updates that are due are made."""
        wanted = list({**self._exchanges, **self.overtaken}) if entries is None else list(entries)
        self.wait_for(wanted)
        for entry in wanted:
            if self.overtaken.get(entry) is False:
                del self.overtaken[entry]
                self._release(entry)

    def wait_for(self, entries: Iterable[SyncedParameter]) -> None:
        """`settle` that ends no doubt about uses that have come before."""
        self._check_thread()
        self._bring(entries)

    def make_ready(self, entries: Iterable[SyncedParameter]) -> None:
        """`settle` before uses of these parameters that are not going to be seen, and that are right then."""
        wanted = list(entries)
        self._bring(wanted)
        for entry in wanted:
            self.overtaken.pop(entry, None)
            self._release(entry)

    def compiling(self) -> None:
        """Settles what is in flight: torch.compile is about to look at a function, perhaps at one of the model."""
        if not self.is_trainer() or not any(isinstance(entry.whole, Watched) for entry in self._entries):
            return
        self.is_compiled = True
        self.make_ready(self._entries)

    def settle_before_backward(self) -> None:
        """`settle()` for a backward pass that begins: may be that of something that has used parameters unseen."""
        self.overtake(by_forward=True)
        self._bring(self._exchanges)

    def _bring(self, entries: Iterable[SyncedParameter]) -> None:
        units = dict.fromkeys(entry.unit for entry in entries if entry in self._exchanges)
        if units:
            self._land([pending for unit in units for pending in self._units[unit]], meanwhile=True)

    @torch._disable_dynamo
    def _land(self, exchanges: Sequence[PendingExchange], meanwhile: bool) -> None:
        """Ends the flight of whole units; `meanwhile`: waiting for them is used to update others."""
        self._runs.check_usable()
        if torch._C._are_functorch_transforms_active():
            raise PoseidonError(
                f"parameter {exchanges[0].entry.name} is used inside a torch.func transform while its update is in "
                "flight: call synchronize() of the DistributedOptimizer before"
            )
        with update_mode(exchanges[0].buffer.device):
            if meanwhile:
                self._update_others(exchanges)
                exchanges = [*exchanges, *self._arrived(exchanges)]
            try:
                self._finish_flights(exchanges)
            except BaseException:
                self._runs.half_landed()
                raise
        if not self._exchanges:
            _FLYING.pop(self, None)
            self._runs.all_landed()

    def _finish_flights(self, exchanges: Sequence[PendingExchange]) -> None:
        self._runs.deliver(exchanges)
        for pending in exchanges:
            del self._exchanges[pending.entry]
            self._units.pop(pending.entry.unit, None)
            if pending.update_is_due and pending.value is None:  # no rank had a gradient: it stays as it was
                self.overtaken.pop(pending.entry, None)
        with unnoticed(pending.entry.whole for pending in exchanges):
            for step in dict.fromkeys(pending.step for pending in exchanges if pending.step is not None):
                step.apply([pending for pending in exchanges if pending.step is step])
        if self.priorities is None or not self.priorities.recording_now:
            for pending in exchanges:
                self._release(pending.entry)

    def _update_others(self, exchanges: Sequence[PendingExchange]) -> None:
        """Makes updates whose gradients are in, the soonest needed first, until those of `exchanges` are."""
        done, awaited = self._runs.done, {pending.entry.unit for pending in exchanges}
        for unit in [unit for unit in self._units if unit not in awaited]:
            if all(map(done, exchanges)):
                return
            others = self._units[unit]
            if any(pending.update_is_due for pending in others) and all(map(done, others)):
                self._land(others, meanwhile=False)

    def _arrived(self, exchanges: Sequence[PendingExchange]) -> Iterator[PendingExchange]:
        """Those that will be needed next and are over, if these are, too: to end them together takes less time."""
        done, awaited = self._runs.done, {pending.entry.unit for pending in exchanges}
        if not all(map(done, exchanges)):
            return
        for unit, others in self._units.items():
            if unit in awaited:
                continue
            if not (any(pending.update_is_due for pending in others) and all(map(done, others))):
                return
            yield from others

    # Uses of the parameters.

    @contextmanager
    def forward(self, module: nn.Module, priorities: Priorities) -> Iterator[None]:
        """Around the module's forward: settles what it cannot wait for by itself, and records the order of uses."""
        if not torch.is_grad_enabled():
            with self._evaluation():  # there is nothing to overlap with
                yield
            return
        opaque = opaque_parameters(module)
        if not opaque:
            self.overtake(by_forward=True)
            with self._recording(priorities):
                yield
            return
        self.make_ready(entry for entry in self._entries if entry.whole in opaque)
        self.overtake(by_forward=True)
        yield

    @contextmanager
    def _recording(self, priorities: Priorities) -> Iterator[None]:
        """Around a forward pass that perhaps gives the order: its uses of parameters are watched then."""
        if not priorities.begin_recording():
            yield
            return
        for entry in self._entries:
            watch(entry.whole, self, entry)
        ended_well = False
        try:
            yield
            ended_well = True
        finally:
            priorities.end_recording(ended_well)
            for entry in self._entries:
                self._release(entry)

    @contextmanager
    def _evaluation(self) -> Iterator[None]:
        """Around one without gradients: all is in place, and no parameter is watched, which fused paths would avoid."""
        self.settle()
        with unnoticed(entry.whole for entry in self.overtaken):
            yield

    def overtake(self, by_forward: bool) -> None:
        """Something begins that may use parameters whose update is due.

        `by_forward`: it is known to be a forward pass; otherwise it may be, and `settle` ends the doubt.
        """
        if self._all_overtaken and not by_forward:
            return
        self._all_overtaken = True
        for entry, pending in self._exchanges.items():
            if pending.update_is_due:
                self.overtaken[entry] = by_forward or self.overtaken.get(entry, False)

    def used(self, entries: Sequence[SyncedParameter]) -> None:
        """As a `Watcher`: the parameters' values are needed now."""
        self._check_thread()
        if self.priorities is not None:
            self.priorities.note_use(entries)
        self._see(entries)
        for entry in entries:
            unwatch(entry.whole)

    def taken(self, entry: SyncedParameter) -> None:
        """As a `Watcher`: someone has taken the parameter out of its module."""
        self._check_thread()
        use_to_come = self.priorities is not None and self.priorities.note_taken(entry)
        if entry in self._exchanges:
            self._see([entry])
        else:
            self.overtaken.pop(entry, None)
        if not use_to_come:
            unwatch(entry.whole)

    @torch._disable_dynamo
    def _see(self, entries: Sequence[SyncedParameter]) -> None:
        if torch.is_grad_enabled():
            self.overtake(by_forward=False)
        for entry in entries:
            self.overtaken.pop(entry, None)
        self._bring(entries)

    def _release(self, entry: SyncedParameter) -> None:
        """Stops watching the parameter, unless there is a reason of its own."""
        if entry not in self._exchanges and entry not in self.overtaken:
            unwatch(entry.whole)

    def gradient_wanted(self, entry: SyncedParameter) -> None:
        """As a `Watcher`: the parameter's `.grad` is about to be read."""
        pending = self._exchanges.get(entry)
        if pending is not None and pending.absent and pending.kept:
            self.settle([entry])

    def gradient_replaced(self, entry: SyncedParameter) -> None:
        """As a `Watcher`: the parameter's `.grad` has been set."""
        pending = self._exchanges.get(entry)
        if pending is not None and pending.absent:
            pending.dropped = True


_ALL: weakref.WeakSet[Flights] = weakref.WeakSet()
# Those that have exchanges in flight, and who listens: both are needed also if the model is dropped.
_FLYING: dict[Flights, object] = {}


def note_compilations(one: Flights) -> None:
    """From now on `one` is told when torch.compile is about to look at a function."""
    call_before_compiling(_tell_all)  # torch._dynamo.reset() forgets it
    _ALL.add(one)


@torch._disable_dynamo
def _tell_all(*_: Any) -> None:  # older versions pass nothing
    for one in list(_ALL):
        one.compiling()


def opaque_parameters(module: nn.Module) -> set[torch.Tensor]:
    """Those of modules that run compiled (torch.compile, torch.jit), where a use of a parameter is not seen."""
    return {
        param
        for part in module.modules()
        if "_orig_mod" in part._modules
        or part._compiled_call_impl is not None
        or isinstance(part, torch.jit.ScriptModule)
        for param in part.parameters()
    }
