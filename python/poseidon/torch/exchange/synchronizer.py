"""Synchronizer: takes gradients from their hooks to the client, and the results back, one backward at a time.

A synchronizing backward begins with its first hook and ends in a callback that autograd runs after the last. In between
every layer's exchange is started as soon as its gradient is complete (WFBP, Poseidon §3.1); the callback starts what
got no gradient, waits, and puts the results into `.grad`. For a parameter that the servers update the result is the
parameter itself, and `.grad` stays.

For a parameter of a worker-side `DistributedOptimizer` the callback does not wait: the exchange outlives its
backward. Whoever needs the gradient, or after step() the parameter, first waits for it alone (`settle`).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from poseidon import _core
from poseidon.adapter.choice.choices import Choices
from poseidon.adapter.control import Control
from poseidon.adapter.features import SAME_STEP, Features
from poseidon.adapter.layer import SyncedLayer
from poseidon.adapter.layer_table import LayerTable, Residual
from poseidon.adapter.priorities import Priorities
from poseidon.adapter.step_check import StepCheck
from poseidon.errors import PoseidonError
from poseidon.options import Settings
from poseidon.schemes import takes_factors
from poseidon.torch.exchange.autograd_threads import caller_of_backward
from poseidon.torch.exchange.backward_end import BackwardEnd, in_compiled_backward
from poseidon.torch.exchange.backward_run import BackwardRun, tell_dropped
from poseidon.torch.exchange.comm_hooks import HookedTransfer
from poseidon.torch.exchange.in_flight import InFlight, UpdateOnServers, reached_twice, stale
from poseidon.torch.exchange.pending_exchange import PendingExchange, start_absent, start_exchange
from poseidon.torch.exchange.powersgd_hook import PowerSGDHook
from poseidon.torch.exchange.small_groups import SmallGroups, changed_meanwhile
from poseidon.torch.exchange.transfer import Transfer
from poseidon.torch.model.parameters import SyncedParameter, attach_all
from poseidon.torch.model.passes import Mode, Passes
from poseidon.torch.model.replica import Unwatched
from poseidon.torch.tensors.compatibility import increment_version
from poseidon.torch.tensors.pending_gradient import GradientGone


class Synchronizer(InFlight):
    """Synchronizes the parameters of one model. Used from the thread that runs backward.

    It exchanges nothing before `connect`. `passes` tells which backward passes exchange gradients.
    """

    _client: _core.Client
    _control: Control
    _transfer: Transfer

    def __init__(self, entries: list[SyncedParameter], settings: Settings, features: Features) -> None:
        super().__init__()
        self.entries = entries[::-1]  # the order in which backward finishes them
        self.passes = Passes()
        self.connected = False
        self.divisor = settings.world_size
        self.attempt = -1  # of `Recovery`, the one that runs; -1: there is no Recovery
        self.last_run: BackwardRun | None = None
        self.on_finished: Callable[[BackwardRun], None] | None = None
        self.before_results: Callable[[], None] | None = None  # at the end of backward, with all exchanges under way
        self.updates: list[UpdateOnServers] = []
        self.hooked: HookedTransfer | None = None  # what gradients go through instead of the exchange, after backward
        self.powersgd: PowerSGDHook | None = None  # what has chosen the layers of that scheme
        self.replica = Unwatched()
        self._groups = SmallGroups()
        self.step_check = StepCheck(enabled=features.keeps(SAME_STEP))
        self.aggregator = "sum"  # what servers make of the gradients
        self.static_graph = False  # all backward passes reach each parameter equally often
        self._fires: dict[SyncedParameter, int] | None = None  # so often each that is reached
        self._settings, self._features = settings, features
        self._sequential = settings.schedule == "sequential"
        self._layers = LayerTable(self.entries)
        self.choices = Choices(settings, self.entries)
        self._run: BackwardRun | None = None
        self._flying: BackwardRun | None = None  # the one that is over but for exchanges in flight
        self._broken: str | None = None
        self._loaded_residuals: Mapping[SyncedLayer, Residual] = {}  # before `connect`
        self.module: Callable[[], Any] = lambda: None  # what is wrapped, as long as it lives
        self.retired = False
        self.some_alone = False  # a backward past the wrapper has left gradients since the last step()

    def connect(self, client: _core.Client, control: Control, transfer: Transfer) -> None:
        """Collective: adds the layers to `client`. If there was one before, what it had under way is dropped."""
        self.abandon()
        self._client, self._control, self._transfer = client, control, transfer
        self.divisor, self.last_run = client.world_size, None
        self._layers.connect(client, control)
        self.choices.connect(client, control, multiplies=self.entries[0].param.device.type == "cpu")
        if not self.connected:
            attach_all(self.entries, self)
        for entry in self.entries:
            entry.capture(entry.terms.uses_factors)
        self.connected = True
        self._groups.connect(client, transfer, self.entries if self._features.keeps(SAME_STEP) else [])
        self._hear_before()
        self.replica.connect(control)
        self.step_check.connect(control)
        self._layers.set_residuals(self._loaded_residuals)
        self._loaded_residuals = {}
        if self.priorities is not None:
            self.priorities.connect(client, control)

    def abandon(self) -> None:
        """Drops what is under way, after the client has failed: exchanges, and the updates that wait for them."""
        self._drop_flights()
        if self._run is not None:
            self._run.uncover()
        self._run = self._flying = self._broken = None
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
        attach_all(self.entries, self)
        for entry in self.entries:
            entry.capture(entry.terms.uses_factors)
        self._hear_before()
        self.retired = False

    def _hear_before(self) -> None:
        """Hears before gradients are accumulated, but for those of groups, whose exchange has a copy of them."""
        for entry in self.entries:
            if not self._groups.has(entry):
                entry.hear_before()

    def begin_attempt(self, number: int) -> None:
        """An attempt at this step begins; the rows that forward has counted before do not count."""
        self.attempt = number
        self._layers.begin_attempt()

    def resume_schemes(self, attempt: int) -> None:
        """After `connect`: the next exchanges take the schemes that they would have taken without a failure."""
        self._layers.resume(attempt)
        self.choices.resume(attempt)

    def residuals(self) -> dict[SyncedLayer, Residual]:
        """Copies of what lossy schemes have not sent yet, by layer. Waits for exchanges of these layers in flight."""
        if not self.connected:
            return {}
        self.settle([entry for entry in self.entries if entry.kept_count])
        return self._layers.residuals()

    def residuals_after_failure(self) -> dict[SyncedLayer, Residual]:
        """The same when the client has failed, so that all exchanges end without a result."""
        if not self.connected:
            return {}
        with suppress(PoseidonError):
            self._client.wait_all()
        return self._layers.residuals()

    def load_residuals(self, residuals: Mapping[SyncedLayer, Residual]) -> None:
        """Makes these the residuals of lossy layers, now or when they are connected. The other ones have none."""
        if not self.connected:
            self._loaded_residuals = residuals
            return
        self.settle([entry for entry in self.entries if entry.kept_count])
        self._layers.set_residuals(residuals)

    def store(self, entries: Collection[SyncedParameter]) -> None:
        """Collective: the servers are to hold these parameters. An update, appended to `updates`, gives them values.

        Before `connect` it only notes that they are.
        """
        self.settle()
        # The others get new layers, too: of a group of small ones nothing is sent until all have contributed.
        renewed = [entry for entry in self.entries if not entry.on_servers]
        for entry in entries:
            entry.hold_on_servers(self._settings.parameter_wire)
        self._renew(renewed)

    def send_as(self, wire: str) -> None:
        """Collective: the gradients of all float32 parameters, none of them on servers, travel in this wire format."""
        self.settle()
        for entry in self.entries:
            if entry.dtype == "float32":
                entry.wish(wire=wire, wire_is_given=True)
        self._renew(self.entries)

    def compress_by(self, hook: PowerSGDHook) -> None:
        """Collective: the matrices that torch's hook compresses take powersgd, from the step on that its state says."""
        self.settle()
        self.powersgd = hook
        for entry in hook.choose_layers(self.entries):
            entry.capture(False)
        self._renew(self.entries)

    def _renew(self, entries: Sequence[SyncedParameter]) -> None:
        """Collective: adds these layers again, because they have changed. Before `connect` there is nothing to do."""
        if self.connected:
            self._layers.renew(entries)
            self._groups.renew()
            self._hear_before()
            self.choices.renew()
        if self.priorities is not None:
            self.priorities.renew()

    def prioritize(self) -> None:
        """From now on backward does not wait for the parameters that have an `update`, and urgent ones go first."""
        if self.priorities is None:
            self.priorities = Priorities(self._settings, self.entries)
            if self.connected:
                self.priorities.connect(self._client, self._control)

    # Hooks, in the order in which a parameter meets them.

    @property
    def mode(self) -> Mode:
        """What the backward pass that runs now does with gradients."""
        return self.passes.mode if self._run is None else Mode.EXCHANGED

    def before_factors(self) -> None:
        """A use of the layer is about to hand over factors."""
        if self.mode is Mode.EXCHANGED:
            self._begin()

    def before_accumulation(self, entry: SyncedParameter, dense: bool) -> None:
        """All uses of the parameter have contributed; `.grad` does not yet hold the dense ones, if any."""
        pending = self.in_flight(entry)
        if pending is not None and pending.step is not None:
            raise stale(entry)
        run = self._run
        if run is None and self.passes.mode is Mode.EXCHANGED:
            run = self._begin()
        if self._is_overtaken(entry):
            raise stale(entry)
        if run is None:
            if entry.stored is not None:
                entry.stored.before_addition()
            self.settle([entry])
            return
        if entry in run.exchanges or self._groups.has_started(entry):
            raise reached_twice(entry)
        if dense and takes_factors(entry.next_scheme):
            entry.note_dense_contribution()

    def after_accumulation(self, entry: SyncedParameter) -> None:
        """`.grad` holds the dense contributions, `entry.factors` the others."""
        run = self._run
        if run is None:
            mode = self.passes.mode
            if mode is not Mode.EXCHANGED:
                entry.accumulated(mode)
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
        if self._run is not None:
            return self._run
        run = self._open_run()
        run.compiled = in_compiled_backward()
        if run.compiled:
            return run  # autograd calls nothing at its end, so the last parameter's hook is taken for it
        if not (self._sequential or self.hooked is not None or self.static_graph or self.passes.nested):
            self._groups.count(run)
        end = BackwardEnd(partial(self.end_backward, run), self.passes.began_in, self.passes.note_nested)
        # Autograd drops the callback unrun when backward fails.
        run.dropped = weakref.finalize(end, tell_dropped, weakref.ref(self), weakref.ref(run))
        end.await_end()
        return run

    def _open_run(self) -> BackwardRun:
        self.check_usable()
        if not self._is_trainer():
            self._client.act_for(caller_of_backward())
        self._control.note_exchange()
        begin_ns = time.monotonic_ns()
        self._settle_before_backward()
        self._land_others()
        self.step_check.begin()
        self.replica.begin_step()
        for update in self.updates:
            update.begin()
        self._agree()
        self._groups.begin()
        self._run = BackwardRun(begin_ns, self.passes.began_ns)
        return self._run

    def check_ended(self) -> None:
        """Raises PoseidonError if a backward pass has ended in the middle of its exchange."""
        if self._run is not None and torch._C._current_graph_task_id() < 0:
            self.backward_failed(self._run)  # in the outer one of two backward passes, after the end of the inner one
            self.check_usable()

    def check_forward(self) -> None:
        """Raises PoseidonError if no forward pass may begin now."""
        self.check_ended()
        self.check_usable()
        if (stray := next((entry.name for entry in self.entries if not entry.on_servers), None)) is not None:
            Features(within=self._features).add("plain_update", stray)  # what other models have is not asked
        for update in self.updates:
            update.check_forward()

    def check_usable(self) -> None:
        """Raises PoseidonError if an earlier backward failed half way, or there is nobody to exchange with yet."""
        if not self.connected:
            raise PoseidonError(
                f"with on_failure={self._settings.on_failure} training runs in attempts of poseidon.Recovery: give it "
                "the model before the first forward pass"
            )
        if self._broken is not None:
            self._client.abort(self._broken)
            raise PoseidonError(f"{self._broken}; end all workers and start again from a checkpoint")

    def backward_failed(self, run: BackwardRun) -> None:
        """Backward raised in the middle of `run`: the ranks no longer agree on what was exchanged."""
        if self._run is not run:
            return
        self._run = None
        run.uncover()
        self._groups.end()
        self._broken = f"rank {self._client.rank}: an earlier backward pass failed after its exchange had started"
        self._broken += run.lacks(self.entries)

    def _agree(self) -> None:
        if self.powersgd is not None:
            self.powersgd.begin_run(self._client, self.attempt)
        self.choices.begin_run(self.attempt)
        self._layers.agree()
        if self.priorities is not None:
            self.priorities.begin_run()

    # Exchange.

    def _start(self, run: BackwardRun, entry: SyncedParameter) -> None:
        goes_on = not run.end_ns and not run.compiled
        pending = start_exchange(self._transfer, entry, self.divisor, not run.missed, in_backward=goes_on)
        run.exchanges[entry], pending.attempt = pending, self.attempt
        if pending.covers:
            self.cover(pending)
        run.started.append(entry)
        entry.start_over()

    def _finish_hooked(self, run: BackwardRun, hooked: HookedTransfer) -> None:
        try:
            hooked.run(self.entries, self._control)
        except BaseException:
            self.backward_failed(run)
            raise
        self.passes.exchanged()
        self._run, self._flying = None, run
        self.all_landed()

    def end_backward(self, run: BackwardRun) -> None:
        """Autograd has called the last hook of `run`."""
        self._finish(run)
        # Python forgets a Ctrl-C that comes while a finalizer runs: there is none in a backward that ends well.
        run.dropped.detach()

    def _finish(self, run: BackwardRun) -> None:
        run.end_ns = time.monotonic_ns()
        if self.hooked is not None:
            self._finish_hooked(run, self.hooked)
            return
        try:
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
            self.deliver(now)
            run.waited_ns += self._groups.finish()
            self._groups.end()
        except BaseException:
            self.backward_failed(run)
            raise
        for update in self.updates:
            update.finished({entry for entry, pending in run.exchanges.items() if pending.value is not None})
        self.passes.exchanged()
        if self.static_graph and self._fires is None:
            self._fires = {entry: run.fires(entry) for entry in run.ready_ns}
        run.exchanges.clear()  # the record of the run must not hold the gradients' memory
        self._run, self._flying = None, run
        for pending in sorted(later, key=lambda pending: pending.entry.position):
            self._take_off(pending)
        if not later:
            self.all_landed()
            self.step_check.end()
            self.replica.look()

    def deliver(self, exchanges: Sequence[PendingExchange]) -> None:
        """Waits for results and puts them where they belong."""
        for pending in exchanges:
            pending.check_untouched()
        since_ns = time.monotonic_ns()
        self._transfer.wait([pending.entry.layer for pending in exchanges])
        run = self._run or self._flying
        if run is not None:
            run.waited_ns += time.monotonic_ns() - since_ns
        # Autograd has to know that these have changed; one call for all, since each is slow.
        increment_version([pending.overwritten for pending in exchanges if pending.overwritten is not None])
        for pending in exchanges:
            pending.arrive(self._client.layer_stats(pending.entry.layer), self._transfer)

    def done(self, pending: PendingExchange) -> bool:
        """Whether the exchange is over."""
        return self._transfer.done(pending.entry.layer)

    def land_in_backward(self, pending: PendingExchange) -> None:
        """A hook of the program's uses the gradient, whose exchange is one of the backward that runs now."""
        self.check_usable()
        run, entry = self._run, pending.entry
        # What is written to a gradient that servers have got has no effect.
        if run is None or entry.on_servers or not run.can_wait_for(entry, self.entries):
            raise changed_meanwhile(entry, "used")
        pending.uncover()
        self.deliver([pending])

    def half_landed(self) -> None:
        """The model cannot be used any more."""
        self._broken = (
            f"rank {self._client.rank}: the exchange of gradients or the update after a backward pass failed, so that "
            "some parameters have made the step and some have not"
        )

    def all_landed(self) -> None:
        """The run is over."""
        run, self._flying = self._flying, None
        self.last_run = run
        if run is not None:
            self.choices.end_run(run)
        if run is not None and self.on_finished is not None:
            self.on_finished(run)

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
        run = self._open_run()
        run.missed = missed
        self._finish(run)

    def shadow(self) -> None:
        """Takes part in the other ranks' backward with nothing to contribute (`join()`)."""
        self.settle()
        self.step_check.begin(contributes=False)
        self._agree()
        if self.hooked is not None:
            self.hooked.run(self.entries, self._control, contributes=False)
            return
        for entry in self.entries:
            start_absent(self._transfer, entry, self.divisor)
        self._transfer.wait([entry.layer for entry in self.entries])
