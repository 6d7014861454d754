"""DistributedDataParallel: a subclass of torch's class of that name, which it can replace."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDistributedDataParallel

from poseidon.adapter.agreement import broadcast_alike
from poseidon.adapter.layer import LossyChoice, SchemeChoice, WireChoice
from poseidon.errors import InvalidArgument, PoseidonError
from poseidon.torch.exchange import comm_hooks
from poseidon.torch.exchange.flights import note_compilations
from poseidon.torch.exchange.synchronizer import Synchronizer
from poseidon.torch.model.parameters import SyncedParameter
from poseidon.torch.process.context import context_of
from poseidon.torch.process.process_groups import default_group, has_same_ranks, ranks_of
from poseidon.torch.tensors.compatibility import compiler
from poseidon.torch.training import torch_arguments
from poseidon.torch.training.copies import ModelCopies, keep_in_state_dict
from poseidon.torch.training.insight import ModelInsight
from poseidon.torch.training.joins import ModelJoins
from poseidon.torch.training.reducer import Reducer, logging_data
from poseidon.torch.training.trained_model import TrainedModel

_MIB = 1 << 20
_set_compiler: Any = torch._C._dynamo.eval_frame.set_eval_frame


class DistributedDataParallel(ModelCopies, ModelJoins, TorchDistributedDataParallel, ModelInsight):
    """Trains `module` synchronously on all workers of the job: after backward every `.grad` is the
    mean over the workers.

    `scheme` is "auto" (the cheapest for each layer and step), the name of a scheme for all layers, or a mapping
    from patterns of parameter or module names to these. The default is the option `scheme`.
    `wire` is how the numbers of float32 gradients travel: "fp32" as they are, "bf16", "fp16" or "int8" rounded, or a
    mapping as for `scheme`. The default is the option `wire`.
    `lossy` is what "auto" may choose beside the exact schemes: "" nothing, a wire format, the name of a lossy scheme,
    or a mapping as for `scheme`. The default is the option `lossy`.
    The other arguments are torch's, by position and by name. `find_unused_parameters`, `static_graph`,
    `skip_all_reduce_unused_params`, `delay_all_reduce_named_params` and all arguments about buckets and their views
    have no effect: unused parameters are always handled exactly, without a search of the graph, and there are no
    buckets. `process_group`, or a `device_mesh` of one dimension, names a part of the job's ranks, which then train as
    a separate job. The default is all ranks.

    Collective: every rank builds the same model in the same order. Raises Mismatch, naming the first difference, if
    the models differ. Raises InvalidArgument, naming the argument or parameter, if something is not supported.
    Forward and backward of one model must run in one thread at a time. A copy or a pickle of the object is a separate
    model, which meets the other ranks when it is first trained. Until then it evaluates alone.
    """

    @torch_arguments.in_torchs_order
    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        scheme: SchemeChoice | None = None,
        wire: WireChoice | None = None,
        lossy: LossyChoice | None = None,
        **newer: Any,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        torch_arguments.check_unknown(newer)
        torch_arguments.check_mixed_precision(mixed_precision)
        torch_arguments.check_delayed(delay_all_reduce_named_params, param_to_hook_all_reduce)
        in_forward, at_start = torch_arguments.buffer_sync(broadcast_buffers, forward_sync_buffers)
        self.process_group: Any = torch_arguments.choose_process_group(process_group, device_mesh)
        self.device_mesh = device_mesh
        here = context_of(self.process_group)
        if self.process_group is not None and here.shard_group is not None:
            raise InvalidArgument(
                "with the option replica the ranks that have the same shard train together, one of each replica: leave "
                "process_group and device_mesh out"
            )
        self.module = module
        self.dim = dim
        self.forward_sync_buffers = in_forward
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.batched_grad_copy = batched_grad_copy
        self.static_graph = static_graph
        self.mixed_precision = mixed_precision
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.bucket_bytes_cap = int((25 if bucket_cap_mb is None else bucket_cap_mb) * _MIB)
        self.broadcast_bucket_size = 250 * _MIB
        self.bucket_bytes_cap_default = bucket_cap_mb is None
        self.bucket_bytes_cap_list = [int(size * _MIB) for size in bucket_cap_mb_list or ()]
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._scheme, self._wire, self._lossy = scheme, wire, lossy
        self._last_error = ""
        self._comm_hooks: list[tuple[Any, object]] = []
        self.comm_hook_name = ""
        """The name of the communication hook; empty with Poseidon's own exchange."""
        self._trained: TrainedModel | None = None
        self._trained = self._join_job()
        if self._trained.sync is not None:
            self._trained.sync.static_graph = static_graph
        self.device_ids, self.output_device = torch_arguments.choose_devices(module, device_ids, output_device)
        exchanged = [entry.param for entry in self._trained.entries]
        self.device = next(iter(exchanged or module.parameters())).device
        self.device_type = self.device.type
        self.is_multi_device_module = False
        self.use_side_stream_for_tensor_copies = True
        self._assign_modules_buffers()
        keep_in_state_dict(self)
        if self.process_group is None and here.shard_group is None:  # otherwise torch's groups are of one replica
            self.process_group = default_group()
        if here.client is not None and not here.recovers:
            self._trained.connect(init_sync, at_start)

    def _join_job(self) -> TrainedModel:
        return TrainedModel(
            self,
            self.module,
            context_of(self.process_group),
            self._scheme,
            self._wire,
            self._lossy,
            self.parameters_to_ignore,
            self.forward_sync_buffers,
            ranks_of(self.process_group),
        )

    def trained_model(self) -> TrainedModel:
        """The model's part in the job. The first call on a copy is collective: it meets the other ranks' copies."""
        if self._trained is None:
            self._trained = self._join_job()
            here = self._trained.context
            if here.client is not None and not here.recovers:
                self._trained.connect(init_sync=False)
        return self._trained

    def connect(self, init_sync: bool = False) -> None:
        """Collective, for `Recovery`: makes the model part of the job's membership."""
        self.trained_model().connect(init_sync)

    # The training loop's part.

    @torch._disable_dynamo(recursive=False)  # as torch's: what is compiled is the module
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module's forward. Before it, rank 0's buffers reach all ranks, as torch's class sends them."""
        if self._computes_alone():
            return self._forward_alone(inputs, kwargs)
        # Asked here and not in a function, which would itself be compiled.
        if compiler is not None:
            compiles = compiler()
        else:
            compiles = _set_compiler(None)
            _set_compiler(compiles)
        inputs, kwargs, surroundings = self._begin_forward(inputs, kwargs, callable(compiles))
        around = TorchDistributedDataParallel._active_ddp_module
        TorchDistributedDataParallel._active_ddp_module = self  # torch.compile then ends graphs where buckets would end
        try:
            with surroundings:
                output = self.module(*inputs, **kwargs)
        finally:
            TorchDistributedDataParallel._active_ddp_module = around
        self._end_forward(output)
        return output

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Begins a forward pass of a module that torch's replicate() has hooked, as torch's class does."""
        return self._begin_forward(inputs, kwargs, compiled=False)[:2]

    def _post_forward(self, output: Any) -> Any:
        """Ends it."""
        self._end_forward(output)
        return output

    @torch._disable_dynamo
    def _begin_forward(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any], compiled: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any], AbstractContextManager[Any]]:
        trained = self.trained_model()
        around = TorchDistributedDataParallel._active_ddp_module
        if around is not None and around is not self:
            raise PoseidonError(
                f"this model is inside another {type(around).__name__}, so that gradients would be averaged twice: "
                "wrap the model once"
            )
        if trained.sync is not None:
            synchronizing = torch.is_grad_enabled() and self.require_backward_grad_sync
            if torch.is_grad_enabled():
                trained.begin_training_pass(synchronizing)
            self._send_buffers(trained, synchronizing)
        if self.device_ids:
            moved, moved_kwargs = self.to_kwargs(inputs, kwargs, self.device_ids[0])
            inputs, kwargs = moved[0], moved_kwargs[0]
        return inputs, kwargs, self._surroundings(trained.sync, compiled)

    def _surroundings(self, sync: Synchronizer | None, compiled: bool) -> AbstractContextManager[Any]:
        if sync is None or sync.layers.priorities is None:
            return nullcontext()
        note_compilations(sync.flights)
        if compiled or sync.flights.is_compiled:  # a use of a parameter would not be seen
            sync.flights.make_ready(sync.entries)
            return nullcontext()
        return sync.flights.forward(self.module, sync.layers.priorities)

    @torch._disable_dynamo
    def _end_forward(self, output: Any) -> None:
        trained = self.trained_model()
        if trained.sync is None:
            return
        if torch.is_grad_enabled():
            trained.sync.passes.end(output, trained.sync.weight.rows)
        if self._buffer_hook_is_after():
            self._sync_buffers_by(trained, 0)
        # As torch's class: only the first pass without gradients after a training pass sends buffers again. So a rank
        # may evaluate more batches than others, or alone.
        self.require_forward_param_sync = torch.is_grad_enabled() and self.require_backward_grad_sync

    def _send_buffers(self, trained: TrainedModel, synchronizing: bool) -> None:
        due = self.forward_sync_buffers and self.require_forward_param_sync and trained.takes_buffers_before_forward
        due = due and not self._buffer_hook_is_after() and bool(trained.buffers.tensors())
        root = 0
        # Who evaluates needs no other rank, unless buffers are due.
        joined = self._present_join() if due or torch.is_grad_enabled() else None
        if joined is not None:
            Join.notify_join_context(self)
            root = joined.notify_forward(synchronizing, due)
        if due:
            trained.check_joins()
            self._sync_buffers_by(trained, root)

    def _buffer_hook_is_after(self) -> bool:
        hook = self.__dict__.get("buffer_hook")
        return hook is not None and hook.buffer_comm_hook_location.name == "POST_FORWARD"

    def _sync_buffers_by(self, trained: TrainedModel, root: int) -> None:
        hook = self.__dict__.get("buffer_hook")
        if hook is None:
            trained.broadcast_buffers(root)
            return
        self._assign_modules_buffers()
        futures = hook.buffer_comm_hook(hook.buffer_comm_hook_state, self.named_module_buffers)
        if futures is not None:
            torch.futures.wait_all(list(futures))

    def _default_broadcast_coalesced(
        self, bufs: Sequence[torch.Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        control = self.trained_model().context.control
        if control is not None:
            found = self.modules_buffers if bufs is None else bufs
            named = {f"buffer {index}": buffer for index, buffer in enumerate(found)}
            broadcast_alike(control, named, authoritative_rank, "list of buffer")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, without waiting for those in flight."""
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        for param in self.parameters():
            param.grad = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates gradients without exchange in backward passes whose forward and backward run inside.

        The first backward outside exchanges the accumulated gradients.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    # Ranks with batches of different sizes. `ModelJoins` is for ranks with different numbers of them.

    def set_weight(self, weight: int) -> None:
        """Says how many rows this rank's next gradients are the mean of, until the next call.

        Then each result is the mean over all rows of all ranks, Σ(w·g)/Σw, and not over the ranks. So ranks may take
        batches of different sizes. Collective: all ranks call it before the same forward pass. It waits for nobody. A
        rank without rows has weight 0 and takes part in the backward pass. With Recovery, call it in each attempt.

        One weight counts for all that an exchange sums up. With `no_sync()`, call it once, before the first forward
        pass of the step, with the rows of all its backward passes, and multiply each loss by its share of these rows.
        InvalidArgument comes from the backward pass, and PoseidonError on the other ranks, if it adds to a gradient
        that another weight was given for, or has reached forward passes with several weights. A gradient that was
        cleared does not count, and the same weight may be given again.

        Raises InvalidArgument for a negative weight, with a communication hook, inside join(), and with
        stragglers=drop, consistency=ssp or async.
        """
        self.trained_model().set_weight(weight)

    # What else torch's class can do.

    @property
    def reducer(self) -> Reducer:
        """The object that answers for torch's reducer."""
        return Reducer(self)

    @property
    def broadcast_buffers(self) -> bool:
        """The former name of `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Lets `hook` average the gradients. Collective.

        `allreduce_hook` does what Poseidon does anyway, so it changes nothing. `fp16_compress_hook` and
        `bf16_compress_hook` set the wire format of all float32 gradients to "fp16" or "bf16". `powerSGD_hook` sets the
        scheme "powersgd" for the matrices that it compresses, from the step on that its state says (docs/lossy.md). Any
        other hook of torch's form, and one of these whose state is another process group than the model's, runs on
        buckets at the end of backward over torch.distributed, without schemes and without overlap. It raises
        InvalidArgument without torch.distributed, or with a DistributedOptimizer.
        """
        try:
            comm_hooks.check_hook(hook)
        except InvalidArgument as error:
            self._last_error = str(error)
            raise
        if self._comm_hooks:
            raise InvalidArgument("register_comm_hook was called before, and a model has one hook: call it once")
        does = comm_hooks.what_it_does(hook)
        if does in ("fp16", "bf16") and self._is_own_group(state):
            self.trained_model().send_as(does)
        elif does == comm_hooks.SCHEME and self._fits_scheme(state):
            self.trained_model().compress_by(comm_hooks.PowerSGDHook(state))
        elif does != comm_hooks.MEAN or (default_group() is not None and not self._is_own_group(state)):
            self.trained_model().exchange_by(
                comm_hooks.HookedTransfer(state, hook, self.bucket_bytes_cap), hook.__qualname__
            )
        if self.synchronizer is None and hook.__qualname__.startswith("_hook_then_optimizer"):
            raise InvalidArgument(
                "an optimizer in the communication hook has nothing that runs it in a job of one worker: call its "
                "step() after backward"
            )
        self._comm_hooks.append((hook, state))
        self.comm_hook_name = hook.__qualname__

    def _fits_scheme(self, state: Any) -> bool:
        """Whether the scheme powersgd does what torch's hook does with this state. If not, says why."""
        reason = comm_hooks.unlike_scheme(state)
        if reason is None and not self._is_own_group(state.process_group):
            reason = "another process group than the model"
        if reason is not None:
            warnings.warn(
                f"powerSGD_hook runs over torch.distributed at the end of backward, because its state has {reason}",
                stacklevel=3,
            )
        return reason is None

    def _is_own_group(self, state: object) -> bool:
        """Whether a hook of torch's with this state would communicate among the model's ranks."""
        # In a job of replicas torch has no group of the model's ranks; its default one stands for them.
        own = default_group() if self.process_group is None else self.process_group
        return has_same_ranks(default_group() if state is None else state, own)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hooks = {"ALLREDUCE": default_hooks.allreduce_hook, "FP16_COMPRESS": default_hooks.fp16_compress_hook}
        self.register_comm_hook(None, hooks[comm_hook_type.name])
        self.comm_hook_name = str(comm_hook_type)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return logging_data(self, self.trained_model(), self.comm_hook_name, self._last_error)

    def _log_and_throw(self, err_type: type[Exception], err_msg: str) -> None:
        self._last_error = err_msg
        raise err_type(err_msg)

    def _set_static_graph(self) -> None:
        if self.trained_model().step_count:
            self._log_and_throw(PoseidonError, "_set_static_graph() should be called before training loop starts")
        self.static_graph = True
        if self.synchronizer is not None:
            self.synchronizer.static_graph = True

    def _update_process_group(self, new_process_group: Any) -> None:
        """Continues with the ranks of another group, which meet in the next forward pass.

        Raises InvalidArgument if a communication hook or a residual would be lost.
        """
        trained = self.trained_model()
        lossy = next((entry.name for entry in trained.entries if entry.asked.may_lose), None)
        hooked = any(comm_hooks.what_it_does(hook) != comm_hooks.MEAN for hook, _ in self._comm_hooks)
        if hooked or lossy is not None:
            what = f"what was not sent of {lossy}" if lossy is not None else "its communication hook"
            raise InvalidArgument(
                f"the model cannot go on in another process group, because {what} would be lost: wrap model.module anew"
            )
        trained.detach()
        self.process_group, self._trained = new_process_group, None

    @property
    def synchronizer(self) -> Synchronizer | None:
        """The object that exchanges this model's gradients. None with one worker."""
        return self.trained_model().sync

    @property
    def synced_parameters(self) -> Sequence[SyncedParameter]:
        """The parameters whose gradients are exchanged, in registration order."""
        return self.trained_model().entries
