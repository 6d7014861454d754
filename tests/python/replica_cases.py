"""Trainings of sharded models that lose whole replicas, and the supervisor that starts these again.

Each replica is a world of torch.distributed, as it is on a machine of its own.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import poseidon.torch as poseidon
from forked import FORK
from poseidon.adapter import recovery
from poseidon.adapter.drain import EXIT_STATUS
from poseidon.launch import free_port
from poseidon.torch.process.context import context
from poseidon.torch.tensors.shard import part_of
from recovery_cases import JOB_SECONDS, Fault, Faults
from sharded_cases import batch, loss_of, momentum_sgd, sharded, whole
from torch_cases import digest
from waiting import compute_for, end
from workers import job_variables


def _work(function: Callable[..., Any], folder: Path, variables: dict[str, str], args: tuple[Any, ...]) -> None:
    os.environ.update(variables)
    torch.set_num_threads(1)
    answer = function(folder, *args)
    path = folder / f"answer-{variables['REPLICA']}-{variables['RANK']}"
    path.write_text(json.dumps(answer))


@dataclass
class Replicas:
    """Starts the ranks of each of `count` replicas of so many `shards`; those that were lost again, whole replicas.

    `only`: starts no more replicas than that. `ends_others_after_s`: so long others of a replica outlive the first.
    """

    folder: Path
    count: int
    shards: int
    restarts: int = 10
    environment: dict[str, str] = field(default_factory=dict)
    only: int = 1 << 30
    ends_others_after_s: float = 0.0
    restarted: int = 0

    def run(self, function: Callable[..., Any], *args: Any) -> list[list[Any]]:
        """Each rank's answer, by replica; None for one that was not started again."""
        meeting, left = free_port(), [self.restarts] * self.count
        running: dict[Any, tuple[int, int, Any]] = {}

        def start(replica: int) -> None:
            port = free_port()
            for rank in range(self.shards):
                variables = {
                    **job_variables(rank, self.shards, port),
                    "POSEIDON_REPLICA": f"{replica}/{self.count}@127.0.0.1:{meeting}",
                    "POSEIDON_SMALL_BYTES": "256",
                    "POSEIDON_FLIGHT_RECORD": str(self.folder),
                    "REPLICA": str(replica),
                    **self.environment,
                }
                process = FORK.Process(target=_work, args=(function, self.folder, variables, args), daemon=True)
                process.start()
                running[process.sentinel] = (replica, rank, process)

        try:
            for replica in range(min(self.only, self.count)):
                start(replica)
            deadline = time.monotonic() + JOB_SECONDS
            while running:
                ended = wait([*running], timeout=max(0.0, deadline - time.monotonic()))
                assert ended, f"{sorted(one[:2] for one in running.values())} did not end in time"
                replica, rank, process = running.pop(ended[0])
                process.join()
                if process.exitcode == 0:
                    continue
                # As a launcher does: the others of the replica are ended, too. Some have failed because of the first.
                others = {key: one for key, one in running.items() if one[0] == replica}
                exits = [process.exitcode, *(one[2].exitcode for one in others.values())]
                ends = {-signal.SIGKILL, EXIT_STATUS}
                assert ends & {*exits}, f"rank {rank} of replica {replica} ended with {process.exitcode}"
                compute_for(self.ends_others_after_s)
                end(*(one[2] for one in others.values()))
                running = {key: one for key, one in running.items() if key not in others}
                if left[replica]:
                    left[replica] -= 1
                    self.restarted += 1
                    start(replica)
        finally:
            end(*(one[2] for one in running.values()))
        return [
            [self._answer(replica, rank) for rank in range(self.shards)]
            for replica in range(min(self.only, self.count))
        ]

    def _answer(self, replica: int, rank: int) -> Any:
        path = self.folder / f"answer-{replica}-{rank}"
        return json.loads(path.read_text()) if path.exists() else None


def killed(replica: int, rank: int, step: int, phase: str, **named: Any) -> Fault:
    """One rank of a replica kills itself."""
    return Fault(100 * replica + rank, step, phase, **named)


@contextmanager
def dying(folder: Path, faults: Sequence[Fault]) -> Iterator[Faults]:
    """Kills this process where one of the faults is its own (`killed`)."""
    rank = os.environ["RANK"]
    os.environ["RANK"] = str(100 * int(os.environ["REPLICA"]) + int(rank))
    try:
        dies = Faults(folder, faults)
    finally:
        os.environ["RANK"] = rank
    yield dies


def sharded_network() -> Any:
    """The network over all ranks of this replica."""
    from torch.distributed.device_mesh import init_device_mesh

    return sharded(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",)))


def make_optimizer(kind: str, model: nn.Module, wrapper: Any) -> torch.optim.Optimizer:
    """SGD with momentum, or "adam"; "overlap" makes it a DistributedOptimizer. For `train`, "clip" and "bf16" count."""
    inner = torch.optim.AdamW(model.parameters(), lr=0.01) if "adam" in kind else momentum_sgd(model)
    return poseidon.DistributedOptimizer(inner, wrapper) if "overlap" in kind else inner


def train(folder: Path, kind: str, steps: int, faults: Sequence[Fault]) -> dict[str, Any]:
    """One rank's training: digests of its shard of the parameters and of the optimizer's state, and what happened."""
    dist.init_process_group("gloo")
    with dying(folder, faults) as dies:
        dies.reached("start", 0)
        poseidon.init()
        model = sharded_network()
        wrapper = poseidon.DistributedDataParallel(model, wire="bf16" if "bf16" in kind else None)
        optimizer = make_optimizer(kind, model, wrapper)
        scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
        if "adam" in kind:
            scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5)
        dies.reached("set-up", 0)
        _watch_adoption(dies)
        training = poseidon.Recovery(wrapper, optimizer, scheduler, seed=7)
        model[2].register_forward_hook(lambda *_: dies.reached("forward", training.step))
        model[1].up.register_full_backward_hook(lambda *_: dies.reached("backward", training.step))
        made, sizes = 0, []
        while training.until(steps):
            with training.attempt():
                made += 1
                size = poseidon.world_size()
                parts = size * dist.get_world_size()
                part = poseidon.rank() * dist.get_world_size() + dist.get_rank()
                assert (part, parts) == context().data_part
                rows = batch(training.step).repeat(2, 1).chunk(parts)[part]
                optimizer.zero_grad()
                loss_of(wrapper, rows).backward()
                if "clip" in kind:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                dies.reached("before step", training.step)
                optimizer.step()
                scheduler.step()
                dies.reached("after step", training.step)
            sizes.append(size)
            dies.reached("between", training.step)
        states = [optimizer.state[parameter] for parameter in model.parameters()]
        state = [value for one in states for _, value in sorted(one.items()) if torch.is_tensor(value)]
        answer = {
            "whole": torch.cat([one.flatten() for one in whole(model)]).tolist(),
            "parameters": digest(map(part_of, model.parameters())),
            "state": digest(map(part_of, state)),
            "steps_made": made,
            "sizes": sizes,
            "history": [[event.step, event.world_size, list(event.replaced)] for event in training.history],
        }
        poseidon.shutdown()
        dist.destroy_process_group()
        return answer


def _watch_adoption(dies: Faults) -> None:
    """The phase "adopt" of step `generation`: the replicas have agreed, and have changed nothing yet."""
    inner = recovery._Agreed.take

    def take(self: Any, *arguments: Any, **named: Any) -> None:
        dies.reached("adopt", context().present_client.generation)
        inner(self, *arguments, **named)

    recovery._Agreed.take = take  # type: ignore[method-assign]
