"""Synchronizer: takes gradients from their hooks to the client, and the results back, one backward at a time.

A synchronizing backward begins with its first hook and ends in a callback that autograd runs after the last. In between
every layer's exchange is started as soon as its gradient is complete (WFBP, Poseidon §3.1); the callback starts what
got no gradient, waits, and puts the results into `.grad`. For a parameter that the servers update the result is the
parameter itself, and `.grad` stays.

For a parameter of a `DistributedOptimizer` the callback does not wait: the exchange outlives its backward. Whoever
needs the gradient, or the parameter once its update is due, first waits for it alone (`settle`).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import torch

from poseidon import _core
from poseidon.adapter.control import Control
from poseidon.adapter.features import SAME_STEP, Features
from poseidon.adapter.saved_steps import SavedSteps
from poseidon.adapter.step_check import StepCheck
from poseidon.errors import PoseidonError
from poseidon.options import Settings
from poseidon.schemes import takes_factors
from poseidon.torch.exchange.comm_hooks import HookedTransfer
from poseidon.torch.exchange.flights import Flights
from poseidon.torch.exchange.model_layers import ModelLayers
from poseidon.torch.exchange.pending_exchange import PendingExchange, Sending
from poseidon.torch.exchange.runs import BackwardEnd, BackwardRun, Runs, caller_of_backward, in_compiled_backward
from poseidon.torch.exchange.transfer import Transfer
from poseidon.torch.exchange.weight import OneWeight, Weight
from poseidon.torch.model.parameters import SyncedParameter
from poseidon.torch.model.passes import Mode, Passes
from poseidon.torch.model.replica import Unwatched
from poseidon.torch.tensors.pending_gradient import GradientGone


class UpdateOnServers(Protocol):
    """The object that is told of the backward passes whose gradients servers turn into updates."""

    def check_forward(self) -> None:
        """PoseidonError if a forward pass would not see the parameters of the last step()."""

    def begin(self) -> None:
        """A synchronizing backward has begun."""

    def finished(self, updated: Collection[SyncedParameter], in_flight: Collection[SyncedParameter]) -> None:
        """Backward has ended; `updated` are the parameters that got an update, those `in_flight` get one later."""


class Synchronizer:
    """Synchronizes the parameters of one model. Used from the thread that runs backward.

    It exchanges nothing before `connect`. `passes` tells which backward passes exchange gradients, `runs` what has
    become of them, `layers` has what the ranks agree on, and `flights` the exchanges that outlive their backward.
    """

    _client: _core.Client
    _control: Control
    _transfer: Transfer

    def __init__(self, entries: list[SyncedParameter], settings: Settings, features: Features) -> None:
        self.entries = entries[::-1]  # the order in which backward finishes them
        self.passes = Passes()
        self.runs = Runs(self.entries)
        self.flights = self._make_flights()
        self.layers = ModelLayers(self.entries, settings, features, self.flights)
        self.runs.on_over.append(self.layers.choices.end_run)
        self.divisor = settings.world_size
        self.before_results: Callable[[], None] | None = None  # at the end of backward, with all exchanges under way
        self.updates: list[UpdateOnServers] = []
        self.saved: SavedSteps | None = None  # of which the parameters on servers are a part
        self.hooked: HookedTransfer | None = None  # what gradients go through instead of the exchange, after backward
        self.replica = Unwatched()
        self.step_check = StepCheck(enabled=features.keeps(SAME_STEP))
        self.static_graph = False  # all backward passes reach each parameter equally often
        self._fires: dict[SyncedParameter, int] | None = None  # so often each that is reached
        self._settings, self._features, self._groups = settings, features, self.layers.groups
        self._sequential = settings.schedule == "sequential"
        self.module: Callable[[], Any] = lambda: None  # what is wrapped, as long as it lives
        self.retired = False
        self.weight = Weight()
        self.one_weight = OneWeight(self.weight)
        self.passes.unlike = self.one_weight.refuse_passes
        self.some_alone = False  # a backward past the wrapper has left gradients since the last step()

    def _make_flights(self) -> Flights:
        return Flights(self.entries, self.runs, weakref.ref(self))

    @property
    def is_void(self) -> bool:
        """Whether nothing is to be exchanged any more, because what is computed now will not count."""
        return False

    def confirm_attempt(self) -> None:
        """An optimizer is about to make the first updates of an attempt. Raises a PoseidonError if that is void."""

    def settle_updates(self) -> None:
        """Waits until updates that are due are made."""
        self.flights.settle(self.flights.due())

    def connect(self, client: _core.Client, control: Control, transfer: Transfer) -> None:
        """Collective: adds the layers to `client`. If there was one before, what it had under way is dropped."""
        self.abandon()
        self._client, self._control, self._transfer = client, control, transfer
        transfer.weight = self.weight
        self.weight.connect(control)
        self.divisor = client.world_size
        self.layers.connect(client, control, transfer, self)
        self.runs.connect(client, transfer)
        self.replica.connect(control)
        self.step_check.connect(control)

    def abandon(self) -> None:
        """Drops what is under way, after the client has failed: exchanges, and the updates that wait for them."""
        self.flights.drop()
        self.runs.drop()
        self._groups.end()

    def retire(self) -> None:
        """Another wrapper of the same parameters is used now: exchanges nothing before `revive`."""
        self.settle()
        for entry in self.entries:
            if entry.stored is not None:
                with suppress(GradientGone):  # which whoever reads it is told
                    entry.stored.before_addition()
            entry.detach()
        self.retired = True

    def revive(self) -> None:
        """This wrapper is used again, and no other one of the same parameters is."""
        self.layers.attach(self)
        self.retired = False

    def settle(self) -> None:
        """Waits until all gradients are in place, and updates that are due are made."""
        self.flights.settle()

    def expected(self) -> list[int]:
        """The layers on servers whose step a backward pass may yet begin, since a forward pass waits for one."""
        if not self.passes.awaits_exchange or self.runs.current is not None:
            return []
        return [entry.layer for entry in self.entries if entry.on_servers]

    # Hooks, in the order in which a parameter meets them.

    @property
    def mode(self) -> Mode:
        """What the backward pass that runs now does with gradients."""
        return self.passes.mode if self.runs.current is None else Mode.EXCHANGED

    def before_factors(self) -> None:
        """A use of the layer is about to hand over factors."""
        if self.runs.current is None and self.passes.mode is Mode.EXCHANGED:
            self._begin()

    def before_accumulation(self, entry: SyncedParameter, dense: bool) -> None:
        """All uses of the parameter have contributed; `.grad` does not yet hold the dense ones, if any."""
        pending = self.flights.in_flight(entry)
        if pending is not None and pending.step is not None:
            raise stale(entry)
        run = self.runs.current
        if run is None and self.passes.mode is Mode.EXCHANGED:
            run = self._begin()
        if entry in self.flights.overtaken:
            raise stale(entry)
        if run is None:
            if entry.stored is not None:
                entry.stored.before_addition()
            self.flights.settle([entry])
            self.one_weight.check(entry, may_mix=self.passes.mode is Mode.OTHERS)
            return
        if entry in run.exchanges or self._groups.has_started(entry):
            raise reached_twice(entry)
        if dense and takes_factors(entry.next_scheme):
            entry.note_dense_contribution()

    def after_accumulation(self, entry: SyncedParameter) -> None:
        """`.grad` holds the dense contributions, `entry.factors` the others."""
        run = self.runs.current
        if run is None:
            mode = self.passes.mode
            if mode is not Mode.EXCHANGED:
                entry.accumulated(mode)
                if mode is Mode.LOCAL or not entry.shared:  # the other model has made it the mean
                    self.one_weight.left(entry)
                self.some_alone |= mode is Mode.OTHERS
                return
            run = self._begin()
        if self._groups.has_started(entry):
            raise reached_twice(entry)
        run.note_gradient(entry, time.monotonic_ns())
        if self._is_complete(run, entry) and not self._groups.take(run, entry, self.divisor):
            self._start(run, entry)
        if run.compiled and len(run.ready_ns) == len(self.entries):
            self._finish(run)

    def _is_complete(self, run: BackwardRun, entry: SyncedParameter) -> bool:
        """Whether the exchange may start now, and not only at the end of backward."""
        if self._sequential or self.hooked is not None:
            return False
        if not self.static_graph:
            return not self.passes.nested  # otherwise another inner pass may add to the gradient
        # The first pass counts how often nested backward passes reach each parameter.
        return self._fires is not None and run.fires(entry) >= self._fires.get(entry, 0)

    def _begin(self) -> BackwardRun:
        run = self._open_run()
        run.compiled = in_compiled_backward()
        if run.compiled:
            return run  # autograd calls nothing at its end, so the last parameter's hook is taken for it
        if not (self._sequential or self.hooked is not None or self.static_graph or self.passes.nested):
            self._groups.count(run)
        end = BackwardEnd(partial(self.end_backward, run), self.passes.began_in, self.passes.note_nested)
        # Autograd drops the callback unrun when backward fails.
        run.dropped = weakref.finalize(end, _tell_dropped, weakref.ref(self), weakref.ref(run))
        end.await_end()
        return run

    def _open_run(self, missed: bool = False) -> BackwardRun:
        self.check_usable()
        self.one_weight.check_all(self.entries)
        if not self.flights.is_trainer():
            self._client.act_for(caller_of_backward())
        self._control.note_exchange()
        begin_ns = time.monotonic_ns()
        self.flights.settle_before_backward()
        self.flights.land_others()
        self.step_check.begin()
        self.replica.begin_step()
        for update in self.updates:
            update.begin()
        if self.saved is not None:
            self.saved.begin([entry.layer for entry in self.entries if entry.on_servers], missed)
        self.layers.agree()
        self._groups.begin()
        self.runs.current = run = BackwardRun(begin_ns, self.passes.began_ns)
        run.missed = missed
        return run

    def check_ended(self) -> None:
        """Raises PoseidonError if a backward pass has ended in the middle of its exchange."""
        run = self.runs.current
        if run is not None and torch._C._current_graph_task_id() < 0:
            self.backward_failed(run)  # in the outer one of two backward passes, after the end of the inner one
            self.check_usable()

    def check_forward(self) -> None:
        """Raises PoseidonError if no forward pass may begin now."""
        self.check_ended()
        self.check_usable()
        if (stray := next((entry.name for entry in self.entries if not entry.on_servers), None)) is not None:
            Features(within=self._features).add("plain_update", stray)  # what other models have is not asked
        for update in self.updates:
            update.check_forward()

    def hear_of(self, failure: PoseidonError) -> None:
        """The client has failed, and something begins for which this rank's neighbours wait: raises the failure."""
        raise failure

    def check_usable(self) -> None:
        """Raises PoseidonError if an earlier backward failed half way, or there is nobody to exchange with yet."""
        if not self.layers.connected:
            raise PoseidonError(
                f"with on_failure={self._settings.on_failure} training runs in attempts of poseidon.Recovery: give it "
                "the model before the first forward pass"
            )
        self.runs.check_usable()

    def backward_failed(self, run: BackwardRun) -> None:
        """Backward raised in the middle of `run`: the ranks no longer agree on what was exchanged."""
        if self.runs.current is run:
            self._groups.end()
            self.runs.fail(run)

    # Exchange.

    def _start(self, run: BackwardRun, entry: SyncedParameter) -> None:
        goes_on = not run.end_ns and not run.compiled
        pending = Sending(self._transfer, self.divisor, not run.missed).start(entry, in_backward=goes_on)
        run.exchanges[entry], pending.attempt = pending, self.layers.attempt
        if pending.covers:
            self.flights.cover(pending)
        run.started.append(entry)
        entry.start_over()

    def end_backward(self, run: BackwardRun) -> None:
        """Autograd has called the last hook of `run`."""
        self._finish(run)
        # Python forgets a Ctrl-C that comes while a finalizer runs: there is none in a backward that ends well.
        run.dropped.detach()

    def _finish(self, run: BackwardRun) -> None:
        run.end_ns = time.monotonic_ns()
        later: list[PendingExchange] = []
        try:
            if self.hooked is not None:
                self.hooked.run(self.entries, self._control)
            else:
                later = self._deliver(run)
        except BaseException:
            self.backward_failed(run)
            raise
        for pending in later:
            pending.leave_backward()
        updated = {entry for entry, pending in run.exchanges.items() if pending.value is not None}
        for update in self.updates:
            update.finished(updated, {pending.entry for pending in later})
        self.passes.exchanged()
        self.one_weight.exchanged()
        if self.static_graph and self._fires is None:
            self._fires = {entry: run.fires(entry) for entry in run.ready_ns}
        run.exchanges.clear()  # the record of the run must not hold the gradients' memory
        self.runs.end(run)
        for pending in sorted(later, key=lambda pending: pending.entry.position):
            self.flights.take_off(pending)
        self.flights.settle_exposed([pending.entry for pending in later if pending.update_is_due])
        if not later:
            self.runs.all_landed()
        if not later and self.hooked is None:
            self.step_check.end()
            self.replica.look()

    def _deliver(self, run: BackwardRun) -> list[PendingExchange]:
        """Starts what got no gradient, and waits for results. Returns the exchanges that may outlive the backward."""
        self._groups.take_rest(run, self.divisor)
        for entry in self._groups.not_started(self.entries):
            if entry not in run.exchanges:
                entry.resume()
                self._start(run, entry)
        if self.before_results is not None:
            self.before_results()
        now: list[PendingExchange] = []
        later: list[PendingExchange] = []
        for pending in run.in_progress():
            pending.check_kept()
            pending.check_untouched()
            (later if pending.may_outlive_backward() else now).append(pending)
        for pending in now:
            pending.uncover()
        self.runs.deliver(now)
        run.waited_ns += self._groups.finish()
        self._groups.end()
        return later

    def steps_behind(self) -> int:
        """Steps of this model that others have completed and this rank has yet to make, as the answers so far say.

        Waits for what is in flight if this rank was late before: then, as a rule, the answers are there already.
        """
        if not any(self._client.layer_stats(entry.layer).late for entry in self.entries):
            return 0
        self.settle()
        return max(self._client.layer_stats(entry.layer).behind for entry in self.entries)

    def exchange_nothing(self, missed: bool = False) -> None:
        """As a backward that reached no parameter: `.grad`, or a stored parameter, becomes what the others made of it.

        `missed`: this rank is in none of the means. Gradients must have been cleared before.
        """
        self.settle()
        self._finish(self._open_run(missed))

    def shadow(self) -> None:
        """Takes part in the other ranks' backward with nothing to contribute (`join()`)."""
        self.settle()
        self.step_check.begin(contributes=False)
        self.layers.agree()
        if self.hooked is not None:
            self.hooked.run(self.entries, self._control, contributes=False)
            return
        sending = Sending(self._transfer, self.divisor)
        for entry in self.entries:
            sending.start_absent(entry)
        self._transfer.wait([entry.layer for entry in self.entries])


def _tell_dropped(target: weakref.ref[Synchronizer], run: weakref.ref[BackwardRun]) -> None:
    """Autograd has dropped what `run` waits for: its backward pass has failed."""
    told, failed = target(), run()
    if told is not None and failed is not None:
        told.backward_failed(failed)


def stale(entry: SyncedParameter) -> PoseidonError:
    """The error if a gradient comes for a parameter that was perhaps used before its last update."""
    return PoseidonError(
        f"parameter {entry.name} got a gradient, but its last update had perhaps not been made when the forward pass "
        "used it: either that pass came before step(), or code that PyTorch does not dispatch used a reference to the "
        "parameter that it had kept; in the latter case let it take the parameter from its module in every pass, or "
        "call synchronize() of the DistributedOptimizer before the forward pass"
    )


def reached_twice(entry: SyncedParameter) -> PoseidonError:
    """The error if a gradient comes for a parameter whose exchange has started in the same backward."""
    return PoseidonError(
        f"parameter {entry.name} received a gradient twice in one backward pass: a nested backward "
        "reached it after its exchange had started; use checkpoint(use_reentrant=False), or static_graph=True"
    )
