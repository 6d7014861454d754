"""One host of `poseidon bench train`: runs rounds of replayed steps with whichever method the controller names."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from poseidon.bench.hosts.fleet import Place
from poseidon.bench.hosts.measures import Counters, interface_counters
from poseidon.bench.training.connections import Bare, HostConnections, Payload, Trainer
from poseidon.bench.training.methods import Method
from poseidon.bench.training.replay import ReplayModel, ReplaySGD, input_token
from poseidon.models import ModelTable

_LEARNING_RATE = 1e-6  # parameters stay in range over any number of steps
_SERVERS_RATE = 1e-4
_FAST_RATE = 30 * _SERVERS_RATE  # of first steps: some digits of a bf16 model's masters change
_STEPS_ALONE, _STEPS_BEFORE = 8, 1000
_SECOND_BETA = 0.999
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Lockstep(Protocol):
    """Keeps hosts together that exchange nothing: a barrier of processes, for example."""

    def wait(self, timeout: float, /) -> object:
        """Returns when all hosts have called it."""


@dataclass(frozen=True)
class HostSetup:
    """What every host of a run is told.

    `bucket_bytes` is torch DDP's. `options` are those of `poseidon.init`. `unscaled` is the table of which `table` is
    a scaled one; None: `table` is whole.
    """

    table: ModelTable
    compute_seconds: float
    bucket_bytes: int
    timeout_seconds: float
    options: dict[str, Any]
    unscaled: ModelTable | None = None


@dataclass(frozen=True)
class Round:
    """What one host measured.

    `ends` has the monotonic time at the end of the warm-up and of each measured step. `interface` and `payload` count
    the bytes of all `counted_steps` steps, until nothing was under way any more. `payload` is None for other methods
    than Poseidon's.
    """

    ends: list[float]
    counted_steps: int
    interface: Counters
    payload: Payload | None


class TrainingHost:
    """A host's process. All methods use the same memory of parameters and momentum, by turns, but for those whose
    servers have the parameters, too."""

    def __init__(self, setup: HostSetup, places: list[Place], rank: int, master_port: int, lockstep: Lockstep) -> None:
        """Connects to the other hosts. `lockstep` is that of all hosts."""
        self._setup = setup
        self._lockstep = lockstep
        self._rank, self._worker_count = rank, len(places)
        self._interface = places[rank].interface
        self._connections = HostConnections(
            places,
            rank,
            master_port,
            timeout_seconds=setup.timeout_seconds,
            options=setup.options,
            bucket_bytes=setup.bucket_bytes,
            init_sync=False,
        )
        # Has the memory between rounds.
        self._resting = self._model(unscaled=setup.unscaled)
        self._momentum = [torch.zeros_like(parameter) for parameter in self._resting.parameters()]
        self._token = input_token()
        self._is_taken = False
        self._update_seconds = 0.0  # of the last update of all parameters without an exchange

    def run_round(
        self, method: Method, warmup_count: int, step_count: int, master_port: int, cold: bool = False
    ) -> Round:
        """Trains `warmup_count` + `step_count` steps, and between them those of a search for a priority threshold.

        With `cold` the steps of that search, and those in which a method does not compress yet, are measured steps.

        `master_port` must be free on host 0, for a new Poseidon job.
        """
        trainer = self._connections.trainer(method, master_port, lambda: self._build(method))
        wrapper: Any = trainer.module
        model: ReplayModel = getattr(wrapper, "module", wrapper)
        if not self._is_taken and not method.on_servers:  # a new trainer's model has taken it
            model.take_memory(self._resting)
            self._is_taken = True
        while trainer.first_steps and not cold:
            self._step(trainer, method)
            trainer.first_steps -= 1
        trainer.settle()  # what the first steps have left must not be counted
        if method.on_servers:
            for group in trainer.optimizer.param_groups:
                group["lr"] = _SERVERS_RATE
        payload, interface = self._connections.payload(method), interface_counters(self._interface)
        lead_in = 0
        while lead_in < warmup_count or (trainer.searching and not cold):
            self._step(trainer, method)
            lead_in += 1
        ends = [time.monotonic()]
        for _ in range(step_count):
            self._step(trainer, method)
            ends.append(time.monotonic())
        trainer.settle()  # what is left of the last step must not meet another method's round
        interface = interface_counters(self._interface) - interface
        moved = self._connections.payload(method)
        trainer.optimizer.zero_grad(set_to_none=True)  # frees the gradients until the method's next round
        if not method.on_servers:
            self._resting.take_memory(model)
            self._is_taken = False
        payload = moved - payload if moved is not None and payload is not None else None
        return Round(ends, lead_in + step_count, interface, payload)

    def close(self) -> None:
        """Ends both libraries' connections."""
        self._connections.close()

    def _step(self, trainer: Trainer, method: Method) -> None:
        trainer.optimizer.zero_grad(set_to_none=True)
        trainer.module(self._token).backward()
        trainer.multiply()
        if method.library == "none":
            # Synchronous training keeps step. Without this the updates of the hosts would spread out in time and get
            # more of the machine's few cores than they get with any exchange.
            self._lockstep.wait(self._setup.timeout_seconds)
        elif method.on_servers:
            # An accelerator updates faster than these cores. What they need for it must not be saved by any method.
            time.sleep(self._update_seconds)
        begin = time.monotonic()
        trainer.optimizer.step()
        if method.library == "none":
            self._update_seconds = time.monotonic() - begin

    def _build(self, method: Method) -> Bare:
        if method.on_servers:
            return self._build_for_servers(_DTYPES[method.dtype])
        model = self._model(memory=self._resting)
        self._is_taken = True
        optimizer = ReplaySGD(model.parameters(), model.timeline, lr=_LEARNING_RATE, momentum=0.9, fused=True)
        for parameter, momentum in zip(model.parameters(), self._momentum, strict=True):
            optimizer.state[parameter]["momentum_buffer"] = momentum
        return Bare(model, optimizer, list(model.linear_weights()))

    def _build_for_servers(self, dtype: torch.dtype) -> Bare:
        """A model of its own, whose optimizer is in the midst of a training: its first steps would change more.

        Some steps show how large gradients are, and are made to look like many. The servers take what rank 0 has.
        """
        model = self._model(beside=self._resting, dtype=dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=_SERVERS_RATE, betas=(0.9, _SECOND_BETA))
        share = self._worker_count**-0.5  # the mean of so many gradients with signs of their own
        for _ in range(_STEPS_ALONE):
            for parameter, gradient in model.drawn().items():
                parameter.grad = gradient * share
            optimizer.step()
        for state in optimizer.state.values():
            state["exp_avg_sq"] /= 1 - _SECOND_BETA**_STEPS_ALONE
            state["step"].fill_(_STEPS_BEFORE)
        for group in optimizer.param_groups:
            group["lr"] = _FAST_RATE
        return Bare(model, optimizer, [])

    def _model(self, **more: Any) -> ReplayModel:
        return ReplayModel(self._setup.table, self._setup.compute_seconds, rank=self._rank, **more)
