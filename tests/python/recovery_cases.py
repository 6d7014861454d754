"""Trainings that lose workers, and the supervisor that starts the lost ones again.

Workers are forked from a server that has imported PyTorch, so that starting one again takes no time.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import poseidon.torch as poseidon
from poseidon.torch.context import context
from poseidon.torch.control import Control
from forked import FORK
from torch_cases import digest
from workers import free_port, job_variables

JOB_SECONDS = 40.0


@dataclass(frozen=True)
class Fault:
    """Worker `rank` (the one it was started as) kills itself once, at `phase` of `step`.

    `delay` seconds later, if that is not 0; it `stalls` meanwhile, or goes on.
    """

    rank: int
    step: int
    phase: str
    delay: float = 0.0
    stalls: bool = False


class Faults:
    """The faults of one job; each happens once, whichever process of its rank gets there."""

    def __init__(self, folder: Path, faults: Sequence[Fault]) -> None:
        self._folder = folder
        self._faults = [fault for fault in faults if fault.rank == int(os.environ["RANK"])]

    def reached(self, phase: str, step: int) -> None:
        """Kills this process if it is to die here."""
        for fault in self._faults:
            if (fault.phase, fault.step) == (phase, step) and self._is_first(fault):
                if fault.delay and not fault.stalls:
                    threading.Timer(fault.delay, _die).start()
                else:
                    time.sleep(fault.delay)
                    _die()

    def _is_first(self, fault: Fault) -> bool:
        try:
            (self._folder / f"fault-{fault.rank}-{fault.step}-{fault.phase}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Result:
    """What one rank says at the end: a digest of the model and the optimizer's state, and what happened."""

    digest: str
    steps_made: int
    world_sizes: list[int]
    history: list[dict[str, Any]]


def _work(function: Callable[..., Any], folder: Path, variables: dict[str, str], args: tuple[Any, ...]) -> None:
    os.environ.update(variables)
    torch.set_num_threads(1)
    answer = function(folder, *args)
    path = folder / f"answer-{variables['RANK']}"
    path.with_suffix(".partial").write_text(json.dumps(answer))
    os.replace(path.with_suffix(".partial"), path)


class Supervisor:
    """Starts the workers of one job, and those that were killed again: `restarts` of each at most."""

    def __init__(self, folder: Path, world_size: int, restarts: int = 10, **environment: str) -> None:
        self._folder = folder
        self._port = free_port()
        self._size = world_size
        self._left = [restarts] * world_size
        self._environment = {
            "POSEIDON_ON_FAILURE": "rejoin",
            "POSEIDON_SMALL_BYTES": "256",
            "POSEIDON_FLIGHT_RECORD": str(folder),
            **environment,
        }
        self.restarted = 0

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Each rank's answer, None for one that was not started again. AssertionError if one fails or is too late."""
        workers: dict[Any, tuple[int, Any]] = {}

        def start(rank: int) -> None:
            variables = {**job_variables(rank, self._size, self._port), **self._environment}
            process = FORK.Process(target=_work, args=(function, self._folder, variables, args), daemon=True)
            process.start()
            workers[process.sentinel] = (rank, process)

        try:
            for rank in range(self._size):
                start(rank)
            deadline = time.monotonic() + JOB_SECONDS
            while workers:
                ended = wait(list(workers), timeout=max(0.0, deadline - time.monotonic()))
                assert ended, f"ranks {sorted(rank for rank, _ in workers.values())} did not end in time"
                for sentinel in ended:
                    rank, process = workers.pop(sentinel)
                    process.join()
                    if process.exitcode == 0:
                        continue
                    assert process.exitcode == -signal.SIGKILL, f"rank {rank} ended with {process.exitcode}"
                    if self._left[rank]:
                        self._left[rank] -= 1
                        self.restarted += 1
                        start(rank)
        finally:
            for _, process in workers.values():
                process.kill()
        return [self._answer(rank) for rank in range(self._size)]

    def _answer(self, rank: int) -> Any:
        path = self._folder / f"answer-{rank}"
        return json.loads(path.read_text()) if path.exists() else None


# Trainings.


def network(kind: str) -> nn.Module:
    """Has a layer that sends factors and small layers; unless the kind says otherwise buffers, too."""
    torch.manual_seed(3)
    norm = nn.LayerNorm(64) if "bufferless" in kind else nn.BatchNorm1d(64)
    dropout = nn.Dropout(0.3 if "dropout" in kind else 0.0)
    return nn.Sequential(nn.Linear(48, 64), norm, nn.Tanh(), nn.Linear(64, 40), dropout, nn.Tanh(), nn.Linear(40, 4))


def batch(step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's part of a step's data; not equally many rows in every step, so schemes change."""
    rows = 6 if step % 3 else 40
    generator = torch.Generator().manual_seed(1000 * step + 10 * size + rank)
    return torch.randn(rows, 48, generator=generator), torch.randn(rows, 4, generator=generator)


def make_optimizer(kind: str, model: poseidon.DistributedDataParallel) -> torch.optim.Optimizer:
    """By the first word: sgd, adam; "overlap" makes it a DistributedOptimizer."""
    inner: torch.optim.Optimizer
    if kind.startswith("sgd"):
        inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    else:
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    return poseidon.DistributedOptimizer(inner, model) if "overlap" in kind else inner


@contextlib.contextmanager
def watched_transfers(faults: Faults, generation: Callable[[], int]) -> Iterator[None]:
    """Counts as the phases "transfer 1", "transfer 2", … of step `generation` what is broadcast in it."""
    counts: dict[int, int] = {}
    inner = Control.broadcast

    def broadcast(self: Control, tensors: Any, root: int) -> None:
        number = counts[generation()] = counts.get(generation(), 0) + 1
        faults.reached(f"transfer {number}", generation())
        inner(self, tensors, root)

    with mock.patch.object(Control, "broadcast", broadcast):
        yield


def train(
    folder: Path, kind: str, steps: int, faults: Sequence[Fault], directory: str | None = None, undo: bool = True
) -> dict[str, Any]:
    """One worker's training; its answer is a `Result` as a dict. `directory`: for snapshots, every second step."""
    dies = Faults(folder, faults)
    dies.reached("start", 0)
    poseidon.init()
    here = context()

    def generation() -> int:
        return 0 if here.client is None else here.client.generation

    with watched_transfers(dies, generation):
        return _train(dies, kind, steps, directory=directory, every=2, undo=undo)


def _train(dies: Faults, kind: str, steps: int, **options: Any) -> dict[str, Any]:
    module = network(kind)
    model = poseidon.DistributedDataParallel(module)
    optimizer = make_optimizer(kind, model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    dies.reached("set-up", 0)
    recovery = poseidon.Recovery(model, optimizer, scheduler, seed=7, **options)
    module[2].register_forward_hook(lambda *_: dies.reached("forward", recovery.step))
    module[3].register_full_backward_hook(lambda *_: dies.reached("backward", recovery.step))
    sizes, made = [], 0
    while recovery.until(steps):
        dies.reached("between", recovery.step)
        with recovery.attempt():
            made += 1
            sizes.append(poseidon.world_size())
            step = recovery.step
            inputs, target = batch(step, poseidon.rank(), poseidon.world_size())
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), target)
            dies.reached("exchange", step)
            loss.backward()
            dies.reached("before step", step)
            optimizer.step()
            dies.reached("after step", step)
            scheduler.step()
            if "barrier" in kind:
                if isinstance(optimizer, poseidon.DistributedOptimizer):
                    optimizer.synchronize()
                poseidon.barrier()
            dies.reached("end", step)
    dies.reached("finished", recovery.step)
    history = [vars(event) for event in recovery.history]
    return vars(Result(parameters_and_state(module, optimizer), made, sizes, history))


def parameters_and_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A digest of the parameters, the buffers and the optimizer's state."""
    states = [optimizer.state[param] for group in optimizer.param_groups for param in group["params"]]
    tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    return digest([*module.parameters(), *module.buffers(), *tensors])
