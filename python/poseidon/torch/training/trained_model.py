"""One wrapped module's part in a job: its parameters, its buffers, and what exchanges their gradients."""

from __future__ import annotations

import sys
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Collection
from functools import partial
from typing import Any

from torch import nn
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDistributedDataParallel

from poseidon.adapter.agreement import check_same
from poseidon.adapter.features import SAME_STEP, Features
from poseidon.adapter.join import JoinedTraining
from poseidon.adapter.layer import LossyChoice, SchemeChoice, WireChoice
from poseidon.adapter.membership import Membership
from poseidon.adapter.plan_table import PlanTable, make_plan_table
from poseidon.adapter.replica_check import replica_check
from poseidon.adapter.run_record import RunRecorder, recorder_of
from poseidon.adapter.stats import Recorder
from poseidon.errors import InvalidArgument, Mismatch
from poseidon.torch.exchange.comm_hooks import SCHEME as POWERSGD
from poseidon.torch.exchange.comm_hooks import HookedTransfer, PowerSGDHook, is_open
from poseidon.torch.exchange.mover import make_transfer
from poseidon.torch.exchange.runs import BackwardRun
from poseidon.torch.exchange.synchronizer import Synchronizer
from poseidon.torch.exchange.void_attempts import DeferringSynchronizer
from poseidon.torch.model.changes import ChangeWatch
from poseidon.torch.model.collect import collect_parameters, describe
from poseidon.torch.model.collector import collector_paused
from poseidon.torch.model.hooks import while_alive
from poseidon.torch.model.parameters import SyncedParameter
from poseidon.torch.model.replica import Replica, Unwatched
from poseidon.torch.model.sharded_parameter import ShardedParameter
from poseidon.torch.model.shards import Around, shards_of
from poseidon.torch.process.context import check_joins
from poseidon.torch.process.process_groups import default_group
from poseidon.torch.training.buffers import ModelBuffers
from poseidon.torch.training.other_trainers import OtherTrainers, check_alone, is_synced, plain, take_over
from poseidon.torch.training.program_optimizers import EmptySteps, OptimizersInBackward


class TrainedModel:
    """The part of a `DistributedDataParallel` that belongs to a job. `sync` is None with one worker.

    Collective, as `connect` is: the ranks of the job make it at the same point. Raises InvalidArgument, naming the
    parameter or module that cannot be synchronized, and Mismatch, naming the first difference between the ranks.
    """

    @collector_paused()
    def __init__(
        self,
        wrapper: nn.Module,
        module: nn.Module,
        here: Membership,
        scheme: SchemeChoice | None,
        wire: WireChoice | None,
        lossy: LossyChoice | None,
        ignored: Collection[str],
        sends_buffers: bool,
        ranks: Collection[int] = (),
    ) -> None:
        check_module(module, here.settings.world_size)
        self.context = here
        self.features = Features("wrapped", within=here.features)
        self._given = plain(module)  # as the program has it
        self.buffers = ModelBuffers(module, frozenset(ignored))
        self._shards = shards_of(module, self.features, ranks, ignored, here.shard_group)
        if self._shards is not None:
            self._around = Around(self._shards)
            wrapper, module = self._around, self._shards
        self.module = module
        self.recorder = Recorder()
        self._run_recorder: RunRecorder | None = None
        self.join: JoinedTraining | None = None
        self.torch_join: Any = None  # its place in the last torch's Join (joins.py)
        self.last_joined: int | None = None  # whose model all took over at the end of the last join()
        self.sync: Synchronizer | None = None
        self.optimizers: list[Any] = []  # what its DistributedOptimizers do, in the order in which they were made
        self.step_count = 0  # synchronizing backward passes so far
        self.same_graph = True  # whether all of them reached the same parameters
        self._first_reached: Collection[SyncedParameter] | None = None  # by the first of them
        self._last_reached: frozenset[SyncedParameter] = frozenset()  # by the one that came last
        self._ignored = frozenset(ignored)
        self._sends_buffers = sends_buffers
        self.entries = collect_parameters(module, scheme, wire, here.settings, self._ignored, lossy)
        if self._shards is None or self.entries:
            _check_entries(self.entries)
        self._changes = ChangeWatch(wrapper, self.entries, self._ignored, is_synced)
        self._in_backward: OptimizersInBackward | None = None
        if sends_buffers and self.buffers.tensors():
            self.features.add("sent_buffers")
        here.features.take(self.features)
        if here.settings.world_size > 1 and self.entries:  # all replicas may have no element of a small sharded model
            self._others = OtherTrainers(self._given, self.entries)
            self.sync = self._make_synchronizer()
            self._run_recorder = recorder_of(here)
        else:
            check_alone(self.entries)

    def _make_synchronizer(self) -> Synchronizer:
        here = self.context
        if here.recovers and here.shard_group is not None:
            sync: Synchronizer = DeferringSynchronizer(
                self.entries, here.settings, here.features, here, here.shard_group
            )
        else:
            sync = Synchronizer(self.entries, here.settings, here.features)
        sync.module = weakref.ref(self._given)
        sync.runs.on_over.append(while_alive(self._finished_step))
        sync.replica = self._make_replica(sync)
        sync.step_check.before = while_alive(self.check_joins)
        if here.features.keeps(SAME_STEP):
            self._empty_steps = EmptySteps(sync, here.rank, while_alive(self._is_in_join))
        if self._shards is not None:
            sync.runs.on_over.insert(0, self._shards.show_gradients)
        if here.recovers and self._sends_buffers:
            # Not before the next forward: whoever has made a step has rank 0's buffers then, should rank 0 be lost.
            sync.before_results = partial(while_alive(self.broadcast_buffers), 0, root_waits=True)
        return sync

    def _make_replica(self, sync: Synchronizer) -> Unwatched:
        check = replica_check(self.context.settings, self.features)
        if check is None:
            return Unwatched()
        replica = Replica(self.module, self._ignored, check)
        replica.paused = while_alive(self._is_in_join)
        replica.confirm_by(updates_here=while_alive(self._is_updated_here), settle=while_alive(sync.settle))
        return replica

    def _is_in_join(self) -> bool:
        return self.features.has("join")

    def _is_updated_here(self) -> bool:
        """Whether optimizers of this process update all parameters, and servers do not."""
        return not any(entry.on_servers for entry in self.entries)

    def _finished_step(self, run: BackwardRun) -> None:
        self.step_count += 1
        reached = run.ready_ns.keys()
        self._first_reached = reached if self._first_reached is None else self._first_reached
        self.same_graph = self.same_graph and reached == self._first_reached
        if reached != self._last_reached:
            lost = self._last_reached - reached
            self._changes.check_heard(entry for entry in self.entries if entry in lost)  # in the order of all ranks
            self._last_reached = frozenset(reached)
        self.recorder.step_finished(run, self.context.client)
        if self._run_recorder is not None and self.sync is not None:
            self._run_recorder.step_finished(run, self.context, self.plan, self.sync.layers.choices.rates)
        if self.context.meter is not None:
            self.context.meter.step_finished(run)
        self.context.tell_notices()
        if self._in_backward is not None:
            self._in_backward.step()

    def connect(self, init_sync: bool, buffers_too: bool = True) -> None:
        """Collective: makes the model part of the job's membership.

        `init_sync`: all ranks take over rank 0's parameters, and, `buffers_too`, its buffers.
        """
        here, sync = self.context, self.sync
        if sync is None:
            return
        check_joins(here, "unjoined_call")
        for entry in self.entries:
            entry.forget_client()
        shares_buffers = self._sends_buffers or (init_sync and buffers_too)
        if shares_buffers:
            self.buffers.check()
        self._others.agree(here.present_control)
        options = f"buffers in forward {self._sends_buffers}, at the start {buffers_too}, init_sync {init_sync}"
        options += f", {sync.layers.powersgd.describe()}" if sync.layers.powersgd is not None else ""
        text = describe(self.module, self.entries, options, self._ignored, shares_buffers)
        check_same(here.present_control, text, "model")
        if self._sends_buffers and self.buffers.tensors():
            self.buffers.connect(here.present_control)
        if init_sync:
            self.broadcast_state(0, buffers_too)
        transfer = make_transfer(here.present_client, self.entries[0].param.device)
        sync.connect(here.present_client, here.present_control, transfer)
        here.in_flight.add(sync)

    def set_weight(self, weight: int) -> None:
        """See DistributedDataParallel.set_weight."""
        here, sync = self.context, self.sync
        if sync is None:
            return  # a mean over one worker
        self.features.add("set_weight")
        sync.one_weight.set(weight, here)

    def plan(self, link_bits_per_s: float | None = None) -> PlanTable:
        """See ModelInsight.plan."""
        sync = self.sync
        if sync is None:
            return make_plan_table(self.entries, self.context)
        return make_plan_table(self.entries, self.context, sync.layers.priorities, link_bits_per_s, sync.layers.choices)

    def detach(self) -> None:
        """Takes its hooks from the parameters: backward passes are the module's own again."""
        if self.sync is not None:
            self.sync.abandon()
            self.context.in_flight.discard(self.sync)
        for entry in self.entries:
            entry.detach()

    def begin_training_pass(self, synchronizing: bool) -> None:
        """A forward pass with gradients begins. `synchronizing`: its backward is to exchange them."""
        assert self.sync is not None
        if self.context.control is not None:
            self.context.control.note_thread()  # hooks of a device's backward run in a thread of autograd's
        self._changes.check()
        if self._shards is not None:
            self._shards.check()
            client = self.context.client
            if client is not None and (failure := client.failure) is not None:
                self.sync.hear_of(failure)  # before FSDP waits for the others of this machine, who may have heard of it
        if self.sync.retired:
            take_over(self._given, self.entries)
            self.sync.revive()
        if self._in_backward is None:
            self._in_backward = OptimizersInBackward(self.entries)
        self.sync.flights.note_thread()
        self.sync.check_forward()
        self.sync.layers.note_compiled_code()
        self.sync.passes.begin(synchronizing)

    def exchange_every_gradient(self) -> None:
        """Gradients of DTensors are exchanged whether or not a forward pass of the whole module has begun."""
        for entry in self.entries:
            if isinstance(entry, ShardedParameter):
                entry.unannounced = while_alive(self.demand_exchange)

    def demand_exchange(self) -> None:
        """The next backward pass is to exchange gradients, whatever forward pass it belongs to."""
        if self.sync is not None:
            self.begin_training_pass(True)
            self.sync.passes.demand()

    @property
    def takes_buffers_before_forward(self) -> bool:
        """Whether rank 0's buffers come when forward passes begin, not at the end of backward."""
        return self.sync is not None and self.sync.before_results is None

    def broadcast_buffers(self, root: int, root_waits: bool = False) -> None:
        """Collective: overwrites the module's buffers with those of `root`, unseen by backward passes still to come.

        Unless `root_waits` that rank does not wait for the others: it may evaluate alone, and they take part when they
        train on. Raises Mismatch, and ends the job, if this rank has other buffers than `root`.
        """
        try:
            self.buffers.broadcast(self.context.present_control, root, root_waits)
        except Mismatch as difference:
            self.context.abort(difference)
            raise

    def broadcast_state(self, root: int, buffers_too: bool) -> None:
        """Collective: overwrites the module's parameters, and, `buffers_too`, its buffers, with those of `root`."""
        if self.sync is not None:
            self.sync.settle()  # nobody sees that the parts of DTensors are used
        params = [param.detach() for name, param in self.module.named_parameters() if name not in self._ignored]
        self.context.present_control.broadcast(params, root)
        self.written()
        if buffers_too:
            self.context.present_control.broadcast(list(self.buffers.tensors().values()), root)

    def written(self) -> None:
        """Parameters have been written to past the module."""
        if self._shards is not None:
            self._shards.written()

    def broadcast_last_state(self, root: int) -> None:
        """Collective, at the end of a `join()`: the model of `root`, one of those that trained longest, for all."""
        self.broadcast_state(root, self._sends_buffers)
        self.last_joined = root

    # As a `JoinedModel`, with more than one worker.

    def divide_by(self, divisor: int) -> None:
        """From the next exchange on the sum over the ranks is divided by this number."""
        assert self.sync is not None
        self.sync.divisor = divisor

    def shadow(self) -> None:
        """Takes part in the other ranks' backward with nothing to contribute."""
        assert self.sync is not None
        self.sync.shadow()

    def check_joins(self) -> None:
        """All ranks of this model begin something together. InvalidArgument if one, in another's join(), misses it."""
        if self.join is None:
            check_joins(self.context, "unjoined")

    def enter_join(self, joined: JoinedTraining) -> None:
        """This join is certainly under way: ranks may run out of data, and what cannot bear that is refused."""
        self.features.add("join")
        if self.context.joined is None:
            self.context.joined = joined

    def end_join(self, joined: JoinedTraining | None) -> None:
        """This join is over, if it was not before: all ranks make the same steps again."""
        if self.join is not joined:
            return
        self.join = None
        if self.context.joined is joined:
            self.context.joined = None
        self.features.remove("join")
        self.features.remove("out_of_data")
        if self.sync is not None:
            self.sync.divisor = self.context.world_size

    def send_as(self, wire: str) -> None:
        """Collective: from now on all float32 gradients travel in this wire format.

        Raises InvalidArgument for a parameter whose scheme sends numbers as they are, or which servers hold already.
        """
        if self.sync is None:
            return  # nothing is sent
        self._check_not_stored()
        for entry in self.entries:
            if entry.dtype == "float32":
                entry.check(wire=wire, wire_is_given=True)
        self.sync.layers.send_as(wire)

    def compress_by(self, hook: PowerSGDHook) -> None:
        """Collective: the matrices that torch's hook compresses take the scheme powersgd, unless they name a scheme.

        Raises InvalidArgument where that is impossible, and Mismatch if the ranks' hooks differ.
        """
        if self.sync is None:
            return  # nothing is sent
        self.features.add("powersgd_hook")
        self._check_not_stored()
        open_ones = [entry for entry in self.entries if is_open(entry)]
        if not open_ones:
            raise InvalidArgument(
                "powerSGD_hook would compress nothing, because a scheme or lossy was given for every parameter: leave "
                "one of the two out"
            )
        for entry in open_ones:
            if entry.dtype == "float32":
                entry.check(scheme=POWERSGD, wire=entry.asked.wire, wire_is_given=True)
        if self.sync.layers.connected:
            check_same(self.context.present_control, hook.describe(), "communication hook")
        self.sync.layers.compress_by(hook)

    def _check_not_stored(self) -> None:
        stored = next((entry.name for entry in self.entries if entry.on_servers), None)
        if stored is not None:
            raise InvalidArgument(
                f"the servers hold parameter {stored} already, and its gradients travel as the optimizer was "
                "told: call register_comm_hook before DistributedOptimizer"
            )

    def exchange_by(self, hooked: HookedTransfer, name: str) -> None:
        """From now on gradients go through a communication hook of torch's form, which is called `name`.

        Raises InvalidArgument if they cannot, and without torch.distributed.
        """
        if self.sync is not None:
            dense = Features(within=self.features)
            for entry in self.entries:
                if entry.form.is_sparse:
                    dense.add("sparse", entry.name)
            dense.check("comm_hook", name)
        if default_group() is None:
            raise InvalidArgument(
                f"{name} communicates over torch.distributed, which does not run: call init_process_group(), or leave "
                "the hook out, since Poseidon exchanges gradients itself"
            )
        if self.sync is None:
            return  # there is nothing to communicate
        self.features.add("comm_hook", name)
        for entry in self.entries:
            entry.capture(False)
        self.sync.hooked = hooked
        if self.context.settings.replica_check == "auto":
            self.sync.replica = Unwatched()  # the hook may average among some of the ranks, or not in every step


class Wrapper:
    """What the parts of `DistributedDataParallel` know of it."""

    @abstractmethod
    def trained_model(self) -> TrainedModel:
        """The model's part in the job."""


def _check_entries(entries: list[SyncedParameter]) -> None:
    if not entries:
        raise InvalidArgument(
            "DistributedDataParallel needs a module with at least one non-empty parameter that requires a gradient"
        )
    devices = {entry.param.device for entry in entries}
    if len(devices) > 1:
        raise InvalidArgument(f"the parameters are on several devices ({devices}): put the model on one")


def check_module(module: nn.Module, world_size: int) -> None:
    """InvalidArgument for modules inside `module` that would train wrong or not at all."""
    fully_sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    if not isinstance(module, nn.Module):
        raise InvalidArgument(
            f"module must be a torch.nn.Module, and is of type {type(module).__name__}: pass the model"
        )
    for name, part in module.named_modules():
        where = f"its part {name!r}" if name else "it"
        if isinstance(part, TorchDistributedDataParallel):
            raise InvalidArgument(
                f"the module must not be wrapped twice, and {where} is a {type(part).__name__} already: wrap the whole "
                "model once, and give this wrapper the .module of the other"
            )
        for own, param in part._parameters.items():
            full = f"{name}.{own}" if name else own
            if isinstance(param, nn.UninitializedParameter):
                raise InvalidArgument(
                    f"parameter {full} is uninitialized, as in lazy modules: run the module on a batch before wrapping "
                    "it"
                )
            if param is not None and param.is_meta:
                raise InvalidArgument(
                    f"parameter {full} is on the meta device and has no values: call module.to_empty(device=...), and "
                    "initialize or load the module, before wrapping it"
                )
        if isinstance(part, fully_sharded):
            raise InvalidArgument(
                f"the module must be whole on every rank, and {where} is sharded by FullyShardedDataParallel: use "
                "fully_shard() of torch.distributed.fsdp and poseidon.torch.replicate(model, mesh)"
            )
        if world_size > 1 and isinstance(part, nn.SyncBatchNorm) and default_group() is None:
            raise InvalidArgument(
                f"the module has SyncBatchNorm layers ({name or 'itself'}), whose statistics go through "
                "torch.distributed: call torch.distributed.init_process_group() before wrapping, or use BatchNorm"
            )
        if world_size > 1 and isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None:
            warnings.warn(
                f"{name or 'the module'} has max_norm, so its forward pass changes the rows that it looks up, on this "
                "rank alone: the replicas will differ, as with torch's class; clip the rows on all ranks instead",
                stacklevel=3,
            )
