"""DistributedDataParallel: the drop-in for torch's class of that name."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from poseidon.errors import InvalidArgument
from poseidon.torch.context import context
from poseidon.torch.drift import check_model, refuse_join
from poseidon.torch.exchange import make_exchange
from poseidon.torch.forward_order import forward_order
from poseidon.torch.join import JoinedTraining
from poseidon.torch.layers import SCHEMES, SchemeChoice, SyncedParameter, collect_parameters
from poseidon.torch.plan_table import PlanTable, make_plan_table
from poseidon.torch.stats import LayerSynchronization, Recorder, StepRecord
from poseidon.torch.synchronizer import BackwardRun, Synchronizer
from poseidon.torch.verify import check_same, describe


class DistributedDataParallel(nn.Module):
    """Trains `module` synchronously on all workers of the job: after backward every `.grad` is the
    mean over the workers.

    `scheme`: "auto" (the cheapest for each layer and step), "ps", "sfb" or "adam" for all layers, or
    a mapping from patterns of parameter or module names to these; default: the option `scheme`.
    The other arguments are torch's. `find_unused_parameters`, `static_graph`, `bucket_cap_mb` and
    `gradient_as_bucket_view` are accepted and change nothing: unused parameters are always handled
    exactly, without searching the graph, and there are no buckets.

    Collective: every rank builds the same model in the same order. Raises Mismatch naming the first
    difference if not, InvalidArgument naming the parameter that cannot be synchronized.
    Forward and backward of one model must run in one thread at a time.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        *,
        scheme: SchemeChoice | None = None,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        find_unused_parameters: bool = False,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        **unsupported: Any,
    ) -> None:
        super().__init__()
        _refuse(unsupported)
        here = context()
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self.require_backward_grad_sync = True
        self._context = here
        self._device = _input_device(module, device_ids, output_device)
        self._ignored = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._agreed_options = f"broadcast_buffers {broadcast_buffers}, init_sync {init_sync}"
        self._recorder = Recorder()
        self._join: JoinedTraining | None = None
        self._entries = self._collect(scheme)
        check_model(here.settings, self._entries, broadcast_buffers and bool(_buffers_to_sync(module, self._ignored)))
        self._sync: Synchronizer | None = None
        if here.settings.world_size > 1:
            self._sync = self._make_synchronizer()
        if here.client is not None and not here.recovers:
            self.connect(init_sync)

    def _collect(self, scheme: SchemeChoice | None) -> list[SyncedParameter]:
        default = self._context.settings.scheme
        entries = collect_parameters(self.module, default if scheme is None else scheme, default, self._ignored)
        if not entries:
            raise InvalidArgument(
                "DistributedDataParallel needs a module with at least one non-empty parameter that requires a gradient"
            )
        devices = {entry.param.device for entry in entries}
        if len(devices) > 1:
            raise InvalidArgument(f"the parameters are on several devices ({devices}): put the model on one")
        return entries

    def _make_synchronizer(self) -> Synchronizer:
        here, module, ignored, recorder = self._context, self.module, self._ignored, self._recorder
        sync = Synchronizer(self._entries, here.settings)

        def finished(run: BackwardRun) -> None:
            recorder.step_finished(run, here.client)
            here.tell_notices()

        # These hold no reference to self: no cycle.
        sync.on_finished = finished
        if here.recovers and self.broadcast_buffers:

            def send_buffers() -> None:
                assert here.control is not None
                here.control.broadcast(_buffers_to_sync(module, ignored), 0)

            # Not before the next forward: whoever has made a step has rank 0's buffers then, should rank 0 be lost.
            sync.before_results = send_buffers
        return sync

    def connect(self, init_sync: bool = False) -> None:
        """Collective: makes the model part of the job's membership, as the constructor does and `Recovery` for each."""
        here, sync = self._context, self._sync
        assert here.client is not None
        assert here.control is not None
        assert sync is not None
        for entry in self._entries:
            entry.start_anew()
        check_same(here.control, describe(self.module, self._entries, self._agreed_options), "model")
        if init_sync:
            self.broadcast_state(0)
        sync.connect(here.client, here.control, make_exchange(here.client, self._entries[0].param.device))
        here.synchronizers.add(sync)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward; before it, in training, the buffers of rank 0 reach all ranks."""
        if self._device is not None:
            args, kwargs = tree_map_only(
                torch.Tensor, lambda tensor: tensor.to(self._device, non_blocking=True), (args, kwargs)
            )
        if self._sync is not None and torch.is_grad_enabled():
            self._before_forward(self._sync)
        if self._sync is None or self._sync.priorities is None:
            return self.module(*args, **kwargs)
        if torch.compiler.is_compiling():
            torch.compiler.disable(self._sync.make_ready)(self._sync.entries)
            return self.module(*args, **kwargs)
        with forward_order(self.module, self._sync, self._sync.priorities):
            return self.module(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, without waiting for those in flight."""
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        for param in self.parameters():
            param.grad = None

    def _before_forward(self, sync: Synchronizer) -> None:
        sync.check_forward()
        sync.armed = True
        sync.synchronizing = self.require_backward_grad_sync
        if not sync.synchronizing:
            sync.local_only()
        sends_buffers = self.broadcast_buffers and sync.synchronizing and sync.before_results is None
        sends_buffers = sends_buffers and bool(_buffers_to_sync(self.module, self._ignored))
        root = 0
        if self._join is not None:
            root = self._join.notify_forward(sync.synchronizing, sends_buffers)
        if sends_buffers:
            self.broadcast_synced_buffers(root)

    def broadcast_synced_buffers(self, root: int) -> None:
        """Collective: overwrites the module's buffers with those of `root`."""
        assert self._context.control is not None
        self._context.control.broadcast(_buffers_to_sync(self.module, self._ignored), root)

    def broadcast_state(self, root: int) -> None:
        """Collective: overwrites the module's parameters and buffers with those of `root`."""
        assert self._context.control is not None
        params = [param.detach() for name, param in self.module.named_parameters() if name not in self._ignored]
        self._context.control.broadcast(params + _buffers_to_sync(self.module, self._ignored), root)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes whose forward ran inside too accumulate gradients without exchange.

        The first backward outside exchanges what was accumulated.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        if self._sync is not None:
            self._sync.local_only()
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Trains with a different number of batches on each rank: a rank that leaves keeps the others going.

        Gradients are divided by the world size, or, with `divide_by_initial_world_size=False`, by the
        number of ranks that still have data. With `throw_on_early_termination` all ranks raise once one
        has run out. In the end every rank has the model of those that trained longest.
        """
        if not enable or self._sync is None:
            yield
            return
        if self._context.recovers:
            raise InvalidArgument(
                f"join() and on_failure={self._context.settings.on_failure} exclude each other: give every rank as "
                "many batches, or use on_failure=abort"
            )
        refuse_join(self._context.settings)
        if self._sync.updates:
            raise InvalidArgument(
                "join() and update='server' exclude each other: rank 0, whose hyperparameters count, may be the one "
                "without data; give every rank as many batches, or use the optimizer without DistributedOptimizer"
            )
        assert self._context.control is not None
        joined = JoinedTraining(
            self, self._sync, self._context.control, divide_by_initial_world_size, throw_on_early_termination
        )
        self._join = joined
        try:
            yield
            joined.shadow_others()
        finally:
            self._join = None
            self._sync.divisor = self._context.world_size

    @property
    def synchronizer(self) -> Synchronizer | None:
        """What exchanges this model's gradients; None with one worker."""
        return self._sync

    @property
    def synced_parameters(self) -> Sequence[SyncedParameter]:
        """The parameters whose gradients are exchanged, in registration order."""
        return self._entries

    def plan(self, link_bits_per_s: float | None = None) -> PlanTable:
        """What the next step will do, layer by layer: scheme, bytes and why; with a link rate also the time.

        With updates on the workers also the urgency and priority class of each layer.
        """
        priorities = None if self._sync is None else self._sync.priorities
        return make_plan_table(self._entries, self._context, priorities, link_bits_per_s)

    def record(self, enabled: bool = True) -> None:
        """Keeps the timing of every synchronizing step from now on, for `recorded_steps()`."""
        self._recorder.enabled = enabled

    def recorded_steps(self) -> list[StepRecord]:
        """The steps since `record(True)`, oldest first. Waits for what is in flight."""
        if self._sync is not None:
            self._sync.settle()
        return list(self._recorder.steps)

    def synchronization_stats(self) -> list[LayerSynchronization]:
        """How the last step's synchronization went, by layer in the order of backward; empty with one worker.

        Waits for what is in flight.
        """
        if self._sync is not None:
            self._sync.settle()
        if self._sync is None or self._sync.last_run is None or self._context.client is None:
            return []
        return StepRecord.of(self._sync.last_run, self._context.client).layers

    def __getstate__(self) -> NoReturn:
        raise InvalidArgument(
            "a DistributedDataParallel cannot be copied or pickled, since it belongs to this process's job: "
            "copy or save model.module, or save model.state_dict()"
        )


def _buffers_to_sync(module: nn.Module, ignored: Collection[str]) -> list[torch.Tensor]:
    return [buffer for name, buffer in module.named_buffers() if name not in ignored]


def _refuse(unsupported: dict[str, Any]) -> None:
    for name, value in unsupported.items():
        if name == "process_group" and value is None:
            continue
        raise InvalidArgument(
            f"DistributedDataParallel has no argument {name!r} here; schemes are chosen by scheme= "
            f"({', '.join(SCHEMES)}), and the workers by poseidon.init()"
        )


def _input_device(
    module: nn.Module, device_ids: Sequence[int | torch.device] | None, output_device: int | torch.device | None
) -> torch.device | None:
    """Where inputs are moved to before forward; None: they stay where they are."""
    if not device_ids:
        return None
    devices = {param.device for param in module.parameters()}
    if len(device_ids) > 1 or any(device.type == "cpu" for device in devices):
        raise InvalidArgument(
            f"device_ids is {list(device_ids)}: leave it out for a module on the CPU, or name the module's one device"
        )
    device = torch.device("cuda", device_ids[0]) if isinstance(device_ids[0], int) else torch.device(device_ids[0])
    if devices != {device} or output_device not in (None, device_ids[0], device):
        raise InvalidArgument(f"device_ids and output_device must name the module's device, {devices}, not {device}")
    return device
