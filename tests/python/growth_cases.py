"""Jobs whose workers come and go while they train, and the same history of members repeated without a failure."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import poseidon.torch as poseidon
import workers
from forked import FORK
from poseidon.adapter import recovery as recovery_module
from poseidon.launch import free_port
from poseidon.torch.process.context import context
from recovery_cases import batch, make_optimizer, network, parameters_and_state
from waiting import compute_for, end, wait_until

TIMEOUT_S = 60  # of the jobs: a lost worker costs a 60th of it
_PAUSE_S = 0.02  # of a step
_PATIENCE_S = 120.0


@dataclass(frozen=True)
class Event:
    """At a step: "start" the worker of a slot, "ask" it to end (SIGTERM), or "kill" it."""

    step: int
    what: str
    slot: int


def random_events(seed: int, first: int, most: int, last: int, steps: int) -> list[Event]:
    """From `first` workers to `most` and back to `last`, with losses among them. Slot 0 comes back when it is lost."""
    draw = random.Random(seed)
    growing, shrinking = steps * 2 // 5, steps * 3 // 5
    events = [Event(draw.randint(2, growing), "start", slot) for slot in range(first, most)]
    for slot in draw.sample(range(most), 2):
        lost = draw.randint(growing + 1, growing + (shrinking - growing) // 2)
        events += [Event(lost, "kill", slot), Event(lost + draw.randint(1, 6), "start", slot)]
    for slot in draw.sample(range(1, most), most - last):
        events.append(Event(draw.randint(shrinking + 1, steps - 8), draw.choice(["ask", "kill"]), slot))
    return sorted(events, key=lambda one: one.step)


@dataclass
class Trained:
    """`sizes`: how many workers made each step. `digests`: of parameters and optimizer state, by slot, at the end.

    `pauses_s`: how long others stood still for workers that joined.
    """

    sizes: list[int]
    digests: dict[int, str]
    pauses_s: list[float] = field(default_factory=list)


def _train(note: Any, kind: str, steps: int, least: int, pause_s: float) -> str:
    poseidon.init(on_failure="shrink", min_workers=least)
    model = poseidon.DistributedDataParallel(network(kind))
    optimizer = make_optimizer(kind, model)
    with mock.patch.object(recovery_module, "_LOOK_SECONDS", 0.05):
        recovery = poseidon.Recovery(model, optimizer, seed=0)
        while recovery.until(steps):
            known = len(recovery.history)
            with recovery.attempt():
                step, size = recovery.step, poseidon.world_size()
                _step(model, optimizer, step, poseidon.rank(), size)
                compute_for(pause_s)
            if recovery.step > step:
                note({"step": step, "size": size, "generation": context().present_client.generation})
            for event in recovery.history[known:]:
                note({"joined": len(event.replaced), "seconds": event.seconds, "cause": event.cause})
    digest = parameters_and_state(model, optimizer)
    poseidon.shutdown()
    return digest


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int, size: int) -> None:
    inputs, target = batch(step, rank, size)
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(inputs), target).backward()
    optimizer.step()


def _work(folder: Path, slot: int, variables: dict[str, str], function: Any, arguments: tuple[Any, ...]) -> None:
    os.environ.update(variables)
    torch.set_num_threads(1)
    with open(folder / f"log-{slot}-{os.getpid()}", "a", encoding="utf-8", buffering=1) as log:
        digest = function(lambda fields: log.write(json.dumps(fields) + "\n"), *arguments)
    (folder / f"digest-{slot}").write_text(digest)


class Fleet:
    """Processes that each run `function(note, *arguments)`, which returns a digest, in slots that come and go."""

    def __init__(
        self, folder: Path, slots: int, function: Any, arguments: tuple[Any, ...], environment: dict[str, str]
    ) -> None:
        folder.mkdir()
        self._folder, self._function, self._arguments = folder, function, arguments
        self.variables = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(slots),
            "POSEIDON_RUN": f"growth {time.monotonic_ns()}",
            "POSEIDON_TIMEOUT": str(TIMEOUT_S),
            "POSEIDON_FLIGHT_RECORD": "off",
            **environment,
        }
        self.running: dict[int, Any] = {}

    def apply(self, event: Event) -> None:
        """Makes it happen, and waits until who is to end has ended."""
        if event.what == "start":
            variables = {**self.variables, "RANK": str(event.slot)}
            arguments = (self._folder, event.slot, variables, self._function, self._arguments)
            self.running[event.slot] = FORK.Process(target=_work, args=arguments, daemon=True)
            self.running[event.slot].start()
            return
        process = self.running.pop(event.slot)
        os.kill(process.pid, signal.SIGTERM if event.what == "ask" else signal.SIGKILL)
        process.join(_PATIENCE_S)
        assert not process.is_alive(), f"slot {event.slot} has not ended"

    def begin(self, first: int, events: Sequence[Event]) -> None:
        """Begins with `first` workers, and makes each event happen when its step comes."""
        for slot in range(first):
            self.apply(Event(0, "start", slot))
        for event in events:
            self.wait_for(event.step)
            self.apply(event)

    def wait_for(self, step: int) -> None:
        """Until this step comes."""
        wait_until(lambda: self.step() >= step, f"step {step}", _PATIENCE_S, 0.02)

    def codes(self) -> dict[int, int]:
        """The exit statuses of those that run, by slot, when all have ended."""
        for process in self.running.values():
            process.join(_PATIENCE_S)
        return {slot: process.exitcode for slot, process in self.running.items()}

    def digests(self) -> dict[int, str]:
        """Of those that have ended by themselves, by slot."""
        return {slot: found.read_text() for slot in self.running if (found := self._folder / f"digest-{slot}").exists()}

    def close(self) -> None:
        """Ends all."""
        for process in self.running.values():
            end(process)

    def records(self) -> Iterator[dict[str, Any]]:
        """All that workers have noted so far."""
        for path in self._folder.glob("log-*"):
            for line in path.read_text("utf-8").splitlines():
                with contextlib.suppress(ValueError):  # the last words of one that was killed
                    yield json.loads(line)

    def step(self) -> int:
        """The step that comes."""
        return 1 + max((one["step"] for one in self.records() if "step" in one), default=-1)


def train(
    folder: Path,
    events: Sequence[Event],
    first: int,
    slots: int,
    steps: int,
    kind: str = "sgd",
    scheme: str = "ps",
    pause_s: float = _PAUSE_S,
) -> Trained:
    """Begins with `first` workers. Each event comes when its step does.

    The scheme is given: "auto" goes by times, which are not the same twice.
    """
    fleet = Fleet(folder, slots, _train, (kind, steps, first, pause_s), {"POSEIDON_SCHEME": scheme})
    with contextlib.closing(fleet):
        fleet.begin(first, events)
        assert set(fleet.codes().values()) == {0}
        records, digests = list(fleet.records()), fleet.digests()
    # A step that was made and then discarded is made again, in a later generation.
    made = sorted((one["step"], one["generation"], one["size"]) for one in records if "step" in one)
    assert len(set(made)) == len({entry[:2] for entry in made}), "all who made a step were as many"
    sizes = {step: size for step, _, size in made}
    joins = [one["seconds"] for one in records if one.get("joined") and "joins" in one["cause"]]
    return Trained([sizes[step] for step in range(steps)], digests, joins)


def _repeat_part(kind: str, begin: int, until: int, before: str, after: str) -> str:
    """Steps of a job whose members stay, from a state in a file."""
    model = poseidon.DistributedDataParallel(network(kind))
    optimizer = make_optimizer(kind, model)
    if begin:
        state = torch.load(before)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for step in range(begin, until):
        _step(model, optimizer, step, poseidon.rank(), poseidon.world_size())
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if poseidon.rank() == 0:
        torch.save(state, after)
    poseidon.barrier()
    return parameters_and_state(model, optimizer)


def repeat(folder: Path, sizes: Sequence[int], kind: str = "sgd", scheme: str = "ps") -> str:
    """The digest after the same steps by as many workers each, in jobs in which nobody comes or goes."""
    place, digest, before = 0, "", ""
    for size, group in groupby(sizes):
        until = place + len(list(group))
        after = str(folder / f"state-{until}")
        digest = workers.run(size, _repeat_part, kind, place, until, before, after, scheme=scheme)[0]
        place, before = until, after
    return digest
