"""Torch DDP and Poseidon side by side in one worker process: models wrapped by each method, kept between rounds."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from poseidon.bench.hosts.fleet import Place
from poseidon.bench.hosts.measures import Counters
from poseidon.bench.training.gloo_hooks import bf16_over_gloo, powersgd_over_gloo
from poseidon.bench.training.methods import METHODS, Method
from poseidon.bench.training.products import Products
from poseidon.bench.training.replay import ReplayModel
from poseidon.schemes import takes_factors

BUCKET_BYTES = 25 << 20  # torch DDP's default
_FAST_STEPS = 1  # after which masters differ from what they are rounded to
_POWERSGD_START = 2  # the first step that PowerSGD may compress; DDP makes its buckets anew before the second


@dataclass(frozen=True)
class Payload:
    """What Poseidon counts of its messages: as they travel, and as they would without coding."""

    sent: Counters
    plain: Counters

    def __sub__(self, other: Payload) -> Payload:
        return Payload(self.sent - other.sent, self.plain - other.plain)


class Bare(NamedTuple):
    """A model before it is wrapped. `factorable` names the weights that Project Adam's strategy sends as factors."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    factorable: list[str]


class Trainer:
    """A wrapped model and its optimizer.

    A DistributedOptimizer leaves a step's exchange under way. `first_steps` steps are still to come that differ from
    all others: the method does not compress yet, or its parameters change faster. `barrier` is called when the worker
    has all results, and its server may still send those of others. `multiply` lets a replayed accelerator make the
    products that are left after a backward pass that has waited for its exchanges.
    """

    def __init__(
        self,
        module: Callable[[torch.Tensor], torch.Tensor],
        optimizer: torch.optim.Optimizer,
        first_steps: int = 0,
        barrier: Callable[[], None] | None = None,
        multiply: Callable[[], None] | None = None,
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.first_steps = first_steps
        self._barrier = barrier
        self._multiply = multiply

    @property
    def searching(self) -> bool:
        """Whether the next step is still part of the search for a priority threshold. All ranks agree on it."""
        return not getattr(self.optimizer, "priority_threshold_found", True)

    def multiply(self) -> None:
        """Call it after each backward pass."""
        if self._multiply is not None:
            self._multiply()

    def settle(self) -> None:
        """Returns when nothing is under way and the parameters are updated."""
        synchronize = getattr(self.optimizer, "synchronize", None)
        if synchronize is not None:
            synchronize()
        if self._barrier is not None:
            self._barrier()


def _compress(wrapped: TorchDistributedDataParallel, method: Method) -> int:
    """Gives the wrapper the method's hook, if it has one. Returns the number of steps until the hook compresses."""
    if method.powersgd_rank is not None:
        state = PowerSGDState(None, method.powersgd_rank, start_powerSGD_iter=_POWERSGD_START)
        wrapped.register_comm_hook(state, powersgd_over_gloo)
        return _POWERSGD_START
    if method.wire != "fp32":
        wrapped.register_comm_hook(None, {"fp16": fp16_compress_hook, "bf16": bf16_over_gloo}[method.wire])
    return 0


def _charge_products(module: Any, model: nn.Module) -> Callable[[], None] | None:
    """Charges the accelerator of a replayed `model` for the products of factors that its wrapper's exchanges leave."""
    if not isinstance(model, ReplayModel) or module.synchronizer is None:
        return None
    from poseidon.torch.process.context import context

    layers = {entry.name: entry.layer for entry in module.synced_parameters}
    rows = [
        (layers[name], linear.row_seconds, len(linear.input_rows)) for name, linear in model.linear_weights().items()
    ]
    model.timeline.products = Products(context().client, rows).arrived
    return model.timeline.multiply


class HostConnections:
    """One worker's connections for every method. It lives in the worker's process and network namespace."""

    def __init__(
        self,
        places: Sequence[Place],
        rank: int,
        master_port: int,
        *,
        timeout_seconds: float,
        options: dict[str, Any],
        bucket_bytes: int = BUCKET_BYTES,
        init_sync: bool = True,
    ) -> None:
        """Blocks until all ranks are here.

        `options` are those of `poseidon.init`, `bucket_bytes` is torch DDP's. With `init_sync` off the first broadcast
        of the parameters is left out. It would only cost time where all ranks build equal parameters.
        """
        self._places = places
        self._rank = rank
        self._timeout_seconds = timeout_seconds
        self._options = options
        self._bucket_bytes = bucket_bytes
        self._init_sync = init_sync
        self._trainers: dict[str, Trainer] = {}
        self._joined: dict[str, Any] | None = None  # the options of the present Poseidon job
        torch.set_num_threads(1)  # the hosts of a testbed share this machine's cores
        os.environ["GLOO_SOCKET_IFNAME"] = places[rank].interface
        store = dist.TCPStore(places[0].address, master_port, len(places), is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=len(places))

    def trainer(self, method: Method, master_port: int, build: Callable[[], Bare]) -> Trainer:
        """Returns the method's trainer. The first call makes it of `build()`. All ranks make the same calls in order.

        `master_port` must be free on host 0, for a new Poseidon job. Poseidon's options hold for a process. So a method
        whose options differ from those of the method before ends that job and its trainers.
        """
        if method.library == "poseidon":
            self._join_poseidon(method, master_port)
        if method.name not in self._trainers:
            self._trainers[method.name] = self._wrap(method, build())
        return self._trainers[method.name]

    def payload(self, method: Method) -> Payload | None:
        """Returns the bytes that Poseidon has moved in its present job; None for other methods."""
        if method.library != "poseidon":
            return None
        from poseidon.torch.process.context import context

        client = context().client
        if client is None:  # one worker exchanges nothing
            return Payload(Counters(), Counters())
        traffic = client.traffic()
        return Payload(
            Counters(received=traffic.bytes_received, sent=traffic.bytes_sent),
            Counters(received=traffic.plain_bytes_received, sent=traffic.plain_bytes_sent),
        )

    def close(self) -> None:
        """Ends both libraries' connections."""
        self._leave_poseidon()
        self._trainers.clear()
        dist.destroy_process_group()

    def _wrap(self, method: Method, bare: Bare) -> Trainer:
        if method.library == "none":
            return Trainer(bare.model, bare.optimizer)
        if method.library == "torch":
            wrapped = TorchDistributedDataParallel(
                bare.model,
                init_sync=self._init_sync,
                bucket_cap_mb=self._bucket_bytes / 2**20,
                process_group=self._group(method.backend),
            )
            return Trainer(wrapped, bare.optimizer, _compress(wrapped, method))
        import poseidon.torch as poseidon

        if method.every > 1:
            local = poseidon.LocalSGD(
                bare.model,
                bare.optimizer,
                method.every,
                wire=method.wire,
                fragments=method.fragments,
                overlap_steps=method.overlap_steps,
            )
            poseidon.barrier()  # what others receive of the first parameters is no step's
            return Trainer(bare.model, local, barrier=poseidon.barrier)
        scheme = dict.fromkeys(bare.factorable, method.scheme) if takes_factors(method.scheme) else method.scheme
        module = poseidon.DistributedDataParallel(
            bare.model, scheme=scheme, wire=method.wire, init_sync=self._init_sync
        )
        if method.on_servers:
            return Trainer(module, poseidon.DistributedOptimizer(bare.optimizer, module, "server"), _FAST_STEPS)
        multiply = _charge_products(module, bare.model)
        if method.overlap:  # what has not arrived yet is multiplied in the next forward pass
            # A replay's optimizer is a subclass of torch's, with its arithmetic.
            return Trainer(module, poseidon.DistributedOptimizer(bare.optimizer, module, per_parameter=True))
        return Trainer(module, bare.optimizer, multiply=multiply)

    def _group(self, backend: str) -> dist.ProcessGroup | None:
        """The process group of all ranks that this backend serves; None: torch's own."""
        if backend == "gloo":
            return None
        import poseidon.torch  # noqa: F401 - makes the backend known

        group: dist.ProcessGroup = dist.new_group(backend=backend)
        return group

    def _join_poseidon(self, method: Method, master_port: int) -> None:
        options = {**self._places[self._rank].options, **self._options, **method.options}
        if self._joined == options:
            return
        self._leave_poseidon()
        import poseidon.torch as poseidon

        poseidon.init(
            rank=self._rank,
            world_size=len(self._places),
            master_addr=self._places[0].address,
            master_port=master_port,
            timeout=self._timeout_seconds,
            **options,
        )
        self._joined = options

    def _leave_poseidon(self) -> None:
        if self._joined is None:
            return
        import poseidon.torch as poseidon

        for name in [name for name in self._trainers if METHODS[name].library == "poseidon"]:
            del self._trainers[name]
        gc.collect()  # wrapped modules and their hooks refer to each other
        poseidon.shutdown()
        self._joined = None
