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
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import poseidon.torch as poseidon
from forked import FORK
from poseidon.adapter.control import Control
from poseidon.adapter.drain import EXIT_STATUS
from poseidon.launch import free_port
from poseidon.options import resolve
from poseidon.schemes import is_lossy
from poseidon.torch.process.context import context
from torch_cases import digest
from waiting import SLOWED, compute_for, end, happens, wait_until
from workers import job_variables

JOB_SECONDS = 40.0 * SLOWED


@dataclass(frozen=True)
class Fault:
    """Worker `rank` (the one it was started as) kills itself once, at `phase` of `step`, or a dedicated `server`.

    `delay` seconds later, if that is not 0; it `stalls` meanwhile, or goes on. `writing`: when next a server writes a
    checkpoint. `signal`: what a worker sends itself; after SIGTERM it leaves in order.
    """

    rank: int
    step: int
    phase: str
    delay: float = 0.0
    stalls: bool = False
    server: int | None = None
    writing: bool = False
    signal: int = signal.SIGKILL


class Faults:
    """The faults of one job; each happens once, whichever process of its rank gets there."""

    def __init__(self, folder: Path, faults: Sequence[Fault]) -> None:
        self._folder = folder
        self._faults = [fault for fault in faults if fault.rank == int(os.environ["RANK"])]

    def reached(self, phase: str, step: int) -> None:
        """Kills this process if it is to die here."""
        for fault in self._faults:
            if (fault.phase, fault.step) == (phase, step) and self._is_first(fault):
                strike = threading.Timer(fault.delay, self._strike, (fault,))
                strike.daemon = True
                strike.start()
                if fault.stalls or not (fault.delay or fault.writing):
                    strike.join()

    def _strike(self, fault: Fault) -> None:
        if fault.writing:
            happens(lambda: any(self._folder.glob("checkpoints/*.tmp")), JOB_SECONDS, every=0.0001)
        if fault.server is None:
            os.kill(os.getpid(), fault.signal)
            return
        # The one before is dead already, until it has been replaced.
        wait_until(lambda: _kill_server(self._folder, fault.server or 0), f"server {fault.server}")

    def _is_first(self, fault: Fault) -> bool:
        try:
            (self._folder / f"fault-{fault.rank}-{fault.step}-{fault.phase}-{fault.server}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


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
    _write(folder / f"answer-{variables['RANK']}", json.dumps(answer))


def _write(path: Path, text: str) -> None:
    path.with_suffix(".partial").write_text(text)
    os.replace(path.with_suffix(".partial"), path)


def _pid_file(folder: Path, server: int) -> Path:
    return folder / f"server-{server}"


def _kill_server(folder: Path, server: int) -> bool:
    """False if it has been killed already and not been replaced yet."""
    taken = folder / f"killed-by-{threading.get_native_id()}"  # a zombie could be killed once more
    try:
        _pid_file(folder, server).rename(taken)
    except FileNotFoundError:
        return False
    os.kill(int(taken.read_text()), signal.SIGKILL)
    return True


def _serve(folder: Path, number: int, port: int, variables: dict[str, str]) -> None:
    """A server that stands alone, until it is killed."""
    from poseidon import _core

    os.environ.update(variables)
    _server = _core.Server.listen(resolve().core(), port)  # as long as there is a reference to it
    _write(_pid_file(folder, number), str(os.getpid()))
    signal.pause()


class Supervisor:
    """Starts the workers of one job, and those that were killed again: `restarts` of each at most.

    The same for dedicated `servers`, each `server_delay` seconds after it was killed.
    """

    def __init__(
        self,
        folder: Path,
        world_size: int,
        restarts: int = 10,
        servers: int = 0,
        server_delay: float = 0.0,
        **environment: str,
    ) -> None:
        self._folder = folder
        self._port = free_port()
        self._size = world_size
        self._left = [restarts] * world_size
        self._server_ports = [free_port() for _ in range(servers)]
        self._server_delay = server_delay
        self._environment = {
            "POSEIDON_ON_FAILURE": "rejoin",
            "POSEIDON_SMALL_BYTES": "256",
            "POSEIDON_FLIGHT_RECORD": str(folder),
            **environment,
        }
        if servers:
            self._environment["POSEIDON_SERVERS"] = ",".join(f"127.0.0.1:{port}" for port in self._server_ports)
            self._environment["POSEIDON_SERVER_CORES"] = "1"
        self.restarted = 0

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Each rank's answer, None for one that was not started again. AssertionError if one fails or is too late."""
        workers: dict[Any, tuple[int, Any]] = {}
        servers: dict[Any, tuple[int, Any]] = {}

        def start_server(number: int) -> None:
            args = (self._folder, number, self._server_ports[number], self._environment)
            process = FORK.Process(target=_serve, args=args, daemon=True)
            process.start()
            servers[process.sentinel] = (number, process)

        def start(rank: int) -> None:
            variables = {**job_variables(rank, self._size, self._port), **self._environment}
            process = FORK.Process(target=_work, args=(function, self._folder, variables, args), daemon=True)
            process.start()
            workers[process.sentinel] = (rank, process)

        try:
            for number in range(len(self._server_ports)):
                start_server(number)
            for rank in range(self._size):
                start(rank)
            deadline = time.monotonic() + JOB_SECONDS
            while workers:
                ended = wait([*workers, *servers], timeout=max(0.0, deadline - time.monotonic()))
                assert ended, f"ranks {sorted(rank for rank, _ in workers.values())} did not end in time"
                for sentinel in ended:
                    if sentinel in servers:
                        number, process = servers.pop(sentinel)
                        process.join()
                        assert process.exitcode == -signal.SIGKILL, f"server {number} ended with {process.exitcode}"
                        self.restarted += 1
                        compute_for(self._server_delay)
                        start_server(number)
                        continue
                    rank, process = workers.pop(sentinel)
                    process.join()
                    if process.exitcode == 0:
                        continue
                    assert process.exitcode in (-signal.SIGKILL, EXIT_STATUS), (
                        f"rank {rank} ended with {process.exitcode}"
                    )
                    if self._left[rank]:
                        self._left[rank] -= 1
                        self.restarted += 1
                        start(rank)
        finally:
            end(*(process for _, process in (*workers.values(), *servers.values())))
        return [self._answer(rank) for rank in range(self._size)]

    def _answer(self, rank: int) -> Any:
        path = self._folder / f"answer-{rank}"
        return json.loads(path.read_text()) if path.exists() else None


# Trainings.


class Lookup(nn.Module):
    """Adds rows of a table, with sparse gradients, that depend on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4, sparse=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.table((100 * inputs[:, 0].detach().abs()).long() % 20)


def network(kind: str) -> nn.Module:
    """Has a layer that sends factors and small layers; unless the kind says otherwise buffers, too."""
    torch.manual_seed(3)
    norm = nn.LayerNorm(64) if "bufferless" in kind else nn.BatchNorm1d(64)
    dropout = nn.Dropout(0.3 if "dropout" in kind else 0.0)
    last = nn.Sequential(nn.Linear(40, 4), Lookup()) if "sparse" in kind else nn.Linear(40, 4)
    return nn.Sequential(nn.Linear(48, 64), norm, nn.Tanh(), nn.Linear(64, 40), dropout, nn.Tanh(), last)


def batch(step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's part of a step's data; not equally many rows in every step, so schemes change."""
    rows = 6 if step % 3 else 40
    generator = torch.Generator().manual_seed(1000 * step + 10 * size + rank)
    return torch.randn(rows, 48, generator=generator), torch.randn(rows, 4, generator=generator)


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """By the first word: sgd, momentum (SGD that takes sparse gradients), adagrad, adam.

    "overlap" and "server" make it a DistributedOptimizer.

    "local" makes it a LocalSGD, which averages after 3 steps, "outer" with an outer optimizer, "streaming" in fragments
    that overlap.
    """
    inner: torch.optim.Optimizer
    if kind.startswith("sgd"):
        inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    elif kind.startswith("momentum"):
        inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    elif kind.startswith("adagrad"):
        inner = torch.optim.Adagrad(model.parameters(), lr=0.01)
    else:
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    if "local" in kind:
        plan = {"fragments": 3, "overlap_steps": 1} if "streaming" in kind else {}
        return poseidon.LocalSGD(model, inner, 3, outer=poseidon.OuterNesterov() if "outer" in kind else None, **plan)
    assert isinstance(model, poseidon.DistributedDataParallel)
    if "server" in kind:
        return poseidon.DistributedOptimizer(inner, model, update="server")
    return poseidon.DistributedOptimizer(inner, model) if "overlap" in kind else inner


@contextlib.contextmanager
def watched_transfers(faults: Faults, generation: Callable[[], int]) -> Iterator[None]:
    """Counts as the phases "transfer 1", "transfer 2", … of step `generation` what is broadcast in it."""
    counts: dict[int, int] = {}

    def counted(inner: Callable[..., None]) -> Callable[..., None]:
        def broadcast(self: Control, *arguments: Any, **options: Any) -> None:
            number = counts[generation()] = counts.get(generation(), 0) + 1
            faults.reached(f"transfer {number}", generation())
            inner(self, *arguments, **options)

        return broadcast

    with (
        mock.patch.object(Control, "broadcast", counted(Control.broadcast)),
        mock.patch.object(Control, "broadcast_bytes", counted(Control.broadcast_bytes)),
    ):
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
    scheme = next((word for word in kind.split() if is_lossy(word)), None)
    model: Any = module if "local" in kind else poseidon.DistributedDataParallel(module, scheme=scheme)
    if "hook" in kind:
        model.register_comm_hook(PowerSGDState(None, 2, start_powerSGD_iter=3), powerSGD_hook)
    optimizer = make_optimizer(kind, model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    dies.reached("set-up", 0)
    objects = [optimizer, scheduler] if "local" in kind else [model, optimizer, scheduler]
    recovery = poseidon.Recovery(*objects, seed=7, **options)
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
    result = Result(parameters_and_state(module, optimizer), made, sizes, history)
    if "server" in kind or "outer" in kind:
        poseidon.barrier()  # the others may still ask this rank's server for the state
    return vars(result)


def parameters_and_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A digest of the parameters, the buffers and the optimizer's state."""
    states = [state for _, state in sorted(optimizer.state_dict()["state"].items())]
    tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    parts = [part for one in tensors for part in ((one._indices(), one._values()) if one.is_sparse else (one,))]
    return digest([*module.parameters(), *module.buffers(), *parts])
