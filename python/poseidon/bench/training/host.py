"""One host of `poseidon bench train`: runs rounds of replayed steps with whichever method the controller names."""

from __future__ import annotations

import time
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from typing import Any

import torch

from poseidon.bench.hosts.fleet import Place
from poseidon.bench.hosts.measures import Counters, interface_counters
from poseidon.bench.training.connections import Bare, HostConnections, Trainer
from poseidon.bench.training.methods import Method
from poseidon.bench.training.replay import ReplayModel, ReplaySGD, input_token
from poseidon.models import ModelTable

_LEARNING_RATE = 1e-6  # parameters stay in range over any number of steps


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
    the bytes of all `counted_steps` steps, until nothing was under way any more. `payload` is what Poseidon counts
    itself. It is None for other methods.
    """

    ends: list[float]
    counted_steps: int
    interface: Counters
    payload: Counters | None


class TrainingHost:
    """A host's process. All methods use the same memory of parameters and momentum, by turns."""

    def __init__(self, setup: HostSetup, places: list[Place], rank: int, master_port: int, lockstep: Barrier) -> None:
        """Connects to the other hosts. `lockstep` is a barrier of all hosts' processes."""
        self._setup = setup
        self._lockstep = lockstep
        self._rank = rank
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
        self._resting = ReplayModel(setup.table, setup.compute_seconds, rank=rank, unscaled=setup.unscaled)
        self._momentum = [torch.zeros_like(parameter) for parameter in self._resting.parameters()]
        self._token = input_token()
        self._is_taken = False

    def run_round(
        self, method: Method, warmup_count: int, step_count: int, master_port: int, cold: bool = False
    ) -> Round:
        """Trains `warmup_count` + `step_count` steps, and between them those of a search for a priority threshold.

        With `cold` the steps of that search, and those in which a method does not compress yet, are measured steps.

        `master_port` must be free on host 0, for a new Poseidon job.
        """
        trainer = self._connections.trainer(method, master_port, self._build)
        wrapper: Any = trainer.module
        model: ReplayModel = getattr(wrapper, "module", wrapper)
        if not self._is_taken:  # a new trainer's model has taken it
            model.take_memory(self._resting)
        self._is_taken = True
        exchanges = method.library != "none"
        while trainer.plain_steps and not cold:
            self._step(trainer, exchanges)
            trainer.plain_steps -= 1
        payload, interface = self._connections.payload(method), interface_counters(self._interface)
        lead_in = 0
        while lead_in < warmup_count or (trainer.searching and not cold):
            self._step(trainer, exchanges)
            lead_in += 1
        ends = [time.monotonic()]
        for _ in range(step_count):
            self._step(trainer, exchanges)
            ends.append(time.monotonic())
        trainer.settle()  # what is left of the last step must not meet another method's round
        interface = interface_counters(self._interface) - interface
        moved = self._connections.payload(method)
        trainer.optimizer.zero_grad(set_to_none=True)  # frees the gradients until the method's next round
        self._resting.take_memory(model)
        self._is_taken = False
        payload = moved - payload if moved is not None and payload is not None else None
        return Round(ends, lead_in + step_count, interface, payload)

    def close(self) -> None:
        """Ends both libraries' connections."""
        self._connections.close()

    def _step(self, trainer: Trainer, exchanges: bool) -> None:
        trainer.optimizer.zero_grad(set_to_none=True)
        trainer.module(self._token).backward()
        trainer.multiply()
        if not exchanges:
            # Synchronous training keeps step. Without this the updates of the hosts would spread out in time and get
            # more of the machine's few cores than they get with any exchange.
            self._lockstep.wait(self._setup.timeout_seconds)
        trainer.optimizer.step()

    def _build(self) -> Bare:
        model = ReplayModel(self._setup.table, self._setup.compute_seconds, rank=self._rank, memory=self._resting)
        self._is_taken = True
        optimizer = ReplaySGD(model.parameters(), model.timeline, lr=_LEARNING_RATE, momentum=0.9, fused=True)
        for parameter, momentum in zip(model.parameters(), self._momentum, strict=True):
            optimizer.state[parameter]["momentum_buffer"] = momentum
        return Bare(model, optimizer, list(model.linear_weights()))
