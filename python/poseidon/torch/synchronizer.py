"""Synchronizer: from the gradients' hooks to the client and back, one backward at a time.

A synchronizing backward begins with its first hook and ends in a callback that autograd runs after
the last. In between every layer's exchange is started as soon as its gradient is complete (WFBP,
Poseidon §3.1); the callback starts what got no gradient, waits, and puts the results into `.grad`.
For a parameter that the servers update the result is the parameter itself, and `.grad` stays.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from poseidon.errors import InvalidArgument, PoseidonError
from poseidon.torch.factors import Factors
from poseidon.torch.layers import FACTOR_SCHEMES, SyncedParameter
from poseidon.torch.memory import exchangeable
from poseidon.torch.server_update import ServerUpdate, StoredParameter

if TYPE_CHECKING:
    from poseidon import _core
    from poseidon.torch.control import Control
    from poseidon.torch.exchange import Exchange


@dataclass(eq=False)
class _Job:
    """One parameter's exchange under way. `in_place`: `buffer` is the memory of `.grad`, or of the parameter."""

    entry: SyncedParameter
    buffer: torch.Tensor
    in_place: bool = False
    absent: bool = False


@dataclass(eq=False)
class BackwardRun:
    """One synchronizing backward pass. Times are of the monotonic clock."""

    begin_ns: int
    jobs: dict[SyncedParameter, _Job] = field(default_factory=dict)
    started: list[SyncedParameter] = field(default_factory=list)
    fired: set[SyncedParameter] = field(default_factory=set)
    end_ns: int = 0


class Synchronizer:
    """Synchronizes the parameters of one model. Used from the thread that runs backward.

    `armed`: some forward pass went through the wrapper. `synchronizing`: the next backward
    exchanges gradients, rather than accumulating them locally (`no_sync()`).
    """

    def __init__(
        self, client: _core.Client, control: Control, entries: list[SyncedParameter], exchange: Exchange, schedule: str
    ) -> None:
        self.entries = entries[::-1]  # the order in which backward finishes them
        self.armed = False
        self.synchronizing = True
        self.divisor = client.world_size
        self.last_run: BackwardRun | None = None
        self.on_finished: Callable[[BackwardRun], None] | None = None
        self.updates: list[ServerUpdate] = []
        self._client = client
        self._control = control
        self._exchange = exchange
        self._sequential = schedule == "sequential"
        self._agreed = False
        self._marks_valid = False
        self._run: BackwardRun | None = None
        self._broken: str | None = None
        self._add_layers(self.entries)
        for entry in self.entries:
            entry.attach(self)

    def uses_factors(self, entry: SyncedParameter) -> bool:
        """Whether the layer may take a scheme that sends factors."""
        return entry.factorable and entry.scheme != "ps"

    def _add_layers(self, entries: Sequence[SyncedParameter]) -> None:
        first, plan = self._client.add_layers([entry.core_layer() for entry in entries])
        for index, entry in enumerate(entries):
            entry.layer = first + index
            if entry.scheme == "auto" and entry.factorable and plan.layers[index].scheme == "ps":
                entry.scheme, entry.grouped = "ps", True
            if entry.stored is not None:
                entry.stored.shard_bytes = self._shard_bytes(plan, index)
        self._factorable = [entry for entry in self.entries if self.uses_factors(entry)]

    def _shard_bytes(self, plan: _core.Plan, layer: int) -> int:
        if plan.cluster.placement != "colocated":
            return 0
        chunks = plan.units[plan.unit_of_layer[layer]].chunks
        return sum(chunk.size_bytes for chunk in chunks if chunk.server == self._client.rank)

    def store(self, entries: Collection[SyncedParameter]) -> None:
        """Collective: the servers are to hold these parameters. An update, appended to `updates`, gives them values."""
        # The others get new layers, too: of a group of small ones nothing is sent until all have contributed.
        renewed = [entry for entry in self.entries if entry.stored is None]
        for entry in entries:
            entry.store(StoredParameter(entry.param))
        self._add_layers(renewed)

    def local_only(self) -> None:
        """From now until the next synchronization gradients may differ between the ranks."""
        self._marks_valid = False

    # Hooks, in the order in which a parameter meets them.

    def before_factors(self, entry: SyncedParameter) -> bool:
        """A use of the layer is about to hand over factors. Whether they outlive this backward."""
        if self.armed and self.synchronizing:
            self._begin()
        return not self.synchronizing

    def before_accumulation(self, entry: SyncedParameter, dense: bool) -> None:
        """All uses of the parameter have contributed; `.grad` does not yet hold the dense ones, if any."""
        if not self.armed or not self.synchronizing:
            return
        run = self._begin()
        if entry in run.jobs:
            raise PoseidonError(
                f"parameter {entry.name} received a gradient twice in one backward pass: a nested backward "
                "reached it after its exchange had started; use checkpoint(use_reentrant=False) or schedule=sequential"
            )
        if dense and entry.next_scheme in FACTOR_SCHEMES:
            entry.note_dense_contribution()
        self._set_base_aside(entry)

    def after_accumulation(self, entry: SyncedParameter) -> None:
        """`.grad` holds the dense contributions, `entry.factors` the others."""
        if not self.armed:
            return
        if not self.synchronizing:
            entry.hold()
            return
        run = self._begin()
        run.fired.add(entry)
        entry.ready_ns = time.monotonic_ns()
        if not self._sequential:
            self._start(run, entry)

    def _begin(self) -> BackwardRun:
        if self._run is not None:
            return self._run
        self.check_usable()
        for update in self.updates:
            update.begin()
        begin_ns = time.monotonic_ns()
        self._choose_schemes()
        run = self._run = BackwardRun(begin_ns)

        def finish() -> None:
            self._finish(run)

        torch.autograd.Variable._execution_engine.queue_callback(finish)  # type: ignore[attr-defined]
        # Autograd drops the callback unrun when backward fails.
        weakref.finalize(finish, _dropped, weakref.ref(self), weakref.ref(run))
        return run

    def check_forward(self) -> None:
        """Raises PoseidonError if no forward pass may begin now."""
        self.check_usable()
        for update in self.updates:
            update.check_forward()

    def check_usable(self) -> None:
        """Raises PoseidonError if an earlier backward failed half way."""
        if self._broken is not None:
            self._client.abort(self._broken)
            raise PoseidonError(f"{self._broken}; end all workers and start again from a checkpoint")

    def backward_failed(self, run: BackwardRun) -> None:
        """Backward raised in the middle of `run`: the ranks no longer agree on what was exchanged."""
        if self._run is not run:
            return
        self._run = None
        self._broken = f"rank {self._client.rank}: an earlier backward pass failed after its exchange had started"
        for entry in self.entries:
            entry.restore_base()

    def _choose_schemes(self) -> None:
        if not self._agreed:
            self._agreed = True
            if self._factorable:
                rows = self._control.sum([entry.forward_rows for entry in self._factorable])
                for entry, count in zip(self._factorable, rows, strict=True):
                    self._client.set_factor_count(entry.layer, count)
        for entry in self._factorable:
            entry.next_scheme = self._client.next_scheme(entry.layer)

    def _set_base_aside(self, entry: SyncedParameter) -> None:
        # A sum of factors has no room for what `.grad` held before. If that is the same on every rank,
        # the result is added to it; every rank must then do so, whatever it contributes itself.
        if self._marks_valid and entry.next_scheme in FACTOR_SCHEMES:
            entry.set_base_aside()

    # Exchange.

    def _start(self, run: BackwardRun, entry: SyncedParameter) -> None:
        factors = entry.factors
        grad = entry.param.grad
        if grad is not None and grad.layout != torch.strided:
            raise InvalidArgument(
                f"parameter {entry.name} has a gradient of layout {grad.layout}, which cannot be synchronized: "
                "only dense gradients can"
            )
        with torch.no_grad():
            if entry.stored is not None:
                run.jobs[entry] = self._start_update(entry, grad)
            elif grad is None and not factors:
                run.jobs[entry] = self._start_absent(entry)
            elif factors and entry.may_send(factors.lefts[0].dtype) and (grad is None or not grad.any()):
                run.jobs[entry] = self._start_factors(entry, factors)
            else:
                run.jobs[entry] = self._start_dense(entry, factors)
        run.started.append(entry)
        entry.start_over()

    def _start_absent(self, entry: SyncedParameter) -> _Job:
        job = _Job(entry, entry.new_buffer(), absent=True)
        self._exchange.absent(entry.layer, job.buffer, self.divisor, entry.next_scheme)
        return job

    def _start_factors(self, entry: SyncedParameter, factors: Factors) -> _Job:
        grad = entry.param.grad
        if grad is not None and exchangeable(grad, entry.layout):
            job = _Job(entry, grad.detach(), in_place=True)
        else:
            job = _Job(entry, entry.new_buffer())
        self._exchange.factors(entry.layer, factors, job.buffer, self.divisor, entry.next_scheme)
        return job

    def _start_dense(self, entry: SyncedParameter, factors: Factors) -> _Job:
        grad = entry.param.grad
        if grad is not None and exchangeable(grad, entry.layout):
            job = _Job(entry, grad.detach(), in_place=True)
        else:
            job = _Job(entry, entry.new_buffer())
            if grad is None:
                job.buffer.zero_()
            else:
                job.buffer.copy_(grad)
        factors.add_to(job.buffer)
        self._exchange.dense(entry.layer, job.buffer, self.divisor, entry.next_scheme, entry.known_factor_count())
        return job

    def _start_update(self, entry: SyncedParameter, grad: torch.Tensor | None) -> _Job:
        param = entry.param.detach()
        in_place = exchangeable(param, entry.layout)
        job = _Job(entry, param if in_place else entry.new_buffer(), in_place, absent=grad is None)
        # Before the memory changes: what still needs the parameter as it was must fail, not compute with another.
        torch.autograd.graph.increment_version(entry.param)
        if grad is None:
            self._exchange.absent(entry.layer, job.buffer, self.divisor, entry.next_scheme)
            return job
        gradient = grad.detach() if exchangeable(grad, entry.layout) else entry.new_buffer().copy_(grad)
        self._exchange.update(entry.layer, gradient, job.buffer, self.divisor)
        return job

    def _finish(self, run: BackwardRun) -> None:
        run.end_ns = time.monotonic_ns()
        try:
            for entry in self.entries:
                if entry not in run.jobs:
                    entry.resume()
                    if entry not in run.fired:
                        entry.ready_ns = run.end_ns
                        self._set_base_aside(entry)
                    self._start(run, entry)
            self._exchange.finish()
        except BaseException:
            self.backward_failed(run)
            raise
        in_place = [job.entry for job in run.jobs.values() if job.in_place and job.entry.stored is None]
        written = [entry.param.grad for entry in in_place if entry.base is None]
        # Autograd has to know that these have changed; one call for all, since each is slow.
        torch.autograd.graph.increment_version([grad for grad in written if grad is not None])
        updated = {job.entry for job in run.jobs.values() if self._deliver(job) and job.entry.stored is not None}
        for update in self.updates:
            update.finished(updated)
        run.jobs.clear()  # the record of the run must not hold the gradients' memory
        self._marks_valid = True
        self._run, self.last_run = None, run
        if self.on_finished is not None:
            self.on_finished(run)

    def _deliver(self, job: _Job) -> bool:
        """Puts a result where it belongs. False: there is none, since no rank contributed."""
        entry, param = job.entry, job.entry.param
        present = not job.absent or self._client.layer_stats(entry.layer).present
        if entry.stored is not None:
            if present and not job.in_place:
                with torch.no_grad():
                    param.copy_(job.buffer)
            return present
        if not present:
            entry.restore_base()
        elif entry.base is not None:
            with torch.no_grad():
                entry.base.add_(job.buffer)
            entry.restore_base()
        elif param.grad is None:
            param.grad = job.buffer
        elif not job.in_place:
            with torch.no_grad():
                param.grad.copy_(job.buffer)
        if entry.factorable:
            entry.mark_identical()
        return present

    def shadow(self) -> None:
        """Takes part in the other ranks' backward with nothing to contribute (`join()`)."""
        self._choose_schemes()
        for entry in self.entries:
            buffer = entry.new_buffer()
            self._exchange.absent(entry.layer, buffer, self.divisor, entry.next_scheme)
        self._exchange.finish()


def _dropped(sync: weakref.ref[Synchronizer], run: weakref.ref[BackwardRun]) -> None:
    target, failed = sync(), run()
    if target is not None and failed is not None:
        target.backward_failed(failed)
