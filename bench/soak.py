#!/usr/bin/env python3
"""Trains with real processes, kills and freezes them at random, and checks that nothing hangs and no bit is wrong.

    python bench/soak.py --minutes 10 --ranks 4

Faults: `kill` and `term` end a process, another takes its place at once. `freeze` stops one for longer than the timeout
and lets it go on. `freeze-kill` stops it and then kills it. `usurp` starts its replacement while it is stopped, so that
it finds its place taken when it goes on, and has to end. At least one process that has the state is always spared.

With rejoin the state at every 20th step is compared, bit for bit, with that of the same training undisturbed; with
shrink, whose mean is over those present, all workers must have the same one. Exit status 1 on a hang, on a wrong bit,
or when a process ends that was not killed.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from fault_job import Event, FaultJob, FaultJobError, Worker
from fault_worker import DIGEST_STEPS

WEIGHTS = {"kill": 6, "term": 3, "freeze": 1, "freeze-kill": 1, "usurp": 1}
ENDING = {"kill", "term"}
FROZEN_TIMEOUTS = 1.2  # how long a frozen process is, in timeouts
CHECKPOINT_EVERY = 10  # steps, of servers that update
STRIKE_AGAIN = 0.3  # share of faults after which another comes before all have recovered
MOST_PER_INCIDENT = 3
SPARE_SECONDS = 60.0  # that no step may take, beyond what faults and timeouts explain
START_SECONDS = 120.0  # more for the first step: all workers import PyTorch at once


@dataclass(frozen=True)
class SoakConfig:
    """What to run. seconds: with faults; every: mean seconds between a recovery and the next fault."""

    seconds: float
    ranks: int = 4
    on_failure: str = "rejoin"
    optimizer: str = "sgd"
    seed: int = 1
    timeout: float = 15.0
    every: float = 3.0
    pace: float = 0.02
    faults: tuple[str, ...] = tuple(WEIGHTS)

    @property
    def patience(self) -> float:
        """Seconds in which a step has to be committed, whatever happened: to freeze, notice, meet and go on."""
        return (FROZEN_TIMEOUTS + 2) * self.timeout + SPARE_SECONDS

    def arguments(self, steps_file: Path, pace: float) -> list[str]:
        """Of the workers."""
        training = ["train", "--seed", str(self.seed), "--optimizer", self.optimizer, "--pace", str(pace)]
        return [*training, "--steps-file", str(steps_file)]

    def options(self, on_failure: str, checkpoints: Path) -> dict[str, object]:
        """Of Poseidon."""
        # The layers are small: by default all would travel in one group.
        options: dict[str, object] = {"on_failure": on_failure, "timeout": self.timeout, "small_bytes": 1024}
        if self.optimizer == "server":
            options |= {"checkpoint_dir": str(checkpoints), "checkpoint_every": CHECKPOINT_EVERY}
        return options


@dataclass
class Incident:
    """From a fault until every slot has committed a step that nothing has disturbed."""

    begun_at: float
    kinds: list[str]
    last_fault_at: float
    committed: set[int] = field(default_factory=set)  # slots that did so since the last fault


@dataclass
class Recovered:
    """One incident that is over."""

    seconds: float
    kinds: list[str]


@dataclass
class SoakResult:
    """What came of it. digests: of the state at the beginning of steps."""

    faults: Counter[str] = field(default_factory=Counter)
    recovered: list[Recovered] = field(default_factory=list)
    steps: int = 0
    digests: dict[int, str] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    compared: int = 0  # digests that were compared with the undisturbed run's
    problems: list[str] = field(default_factory=list)

    def note_digest(self, event: Event) -> None:
        """All workers must have the same state at a step, whenever they do it."""
        step, value = event.data["step"], event.data["value"]
        if self.digests.setdefault(step, value) != value:
            self.problems.append(f"wrong bit: slot {event.slot} has another state than others at step {step}")

    def compare(self, undisturbed: SoakResult) -> None:
        """With the same training without faults."""
        common = sorted(self.digests.keys() & undisturbed.digests.keys())
        self.compared = len(common)
        wrong = [step for step in common if self.digests[step] != undisturbed.digests[step]]
        if wrong:
            self.problems.append(f"wrong bit: the state differs from the undisturbed run's from step {wrong[0]} on")
        if not common:
            self.problems.append("nothing could be compared with the undisturbed run")


class Soak:
    """One run with faults. A single thread: events of the workers and timers take turns."""

    def __init__(self, config: SoakConfig, job: FaultJob, steps_file: Path) -> None:
        self._config = config
        self._job = job
        self._steps_file = steps_file
        self._random = random.Random(config.seed)
        self._result = SoakResult()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._incident: Incident | None = Incident(time.monotonic(), [], 0.0)  # the start, without a fault
        self._stateful: set[int] = set()  # processes that have committed a step
        self._doomed: set[int] = set()  # processes that are to end with a failure
        self._last_sign = time.monotonic() + START_SECONDS  # of life, or a fault, which needs time
        self._usurped: list[Worker] = []
        self._over = False
        self._begun_at = time.monotonic()

    def run(self) -> SoakResult:
        """Until the time is over and all have ended."""
        self._job.start_all()
        finished: set[int] = set()
        while len(finished) < self._config.ranks:
            now = time.monotonic()
            if now - self._last_sign > self._config.patience:
                self._result.problems.append(
                    f"hang: no step for {self._config.patience:g} s; incident: {self._incident}{self._job.report()}"
                )
                break
            event = self._job.next_event(min(self._timers[0][0] - now if self._timers else 1.0, 1.0))
            if event is not None and self._note(event):
                finished.add(event.slot)
            while self._timers and self._timers[0][0] <= time.monotonic():
                heapq.heappop(self._timers)[2]()
        for worker in self._usurped:
            self._check_usurped(worker)
        return self._result

    def _tell(self, text: str) -> None:
        """On standard error: a soak is long."""
        seconds = time.monotonic() - self._begun_at
        print(f"{seconds:8.1f} s, step {self._result.steps}: {text}", file=sys.stderr, flush=True)

    def _at(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), action))

    # What the workers say.

    def _note(self, event: Event) -> bool:
        """True when a slot has finished its training."""
        if event.what == "digest":
            self._result.note_digest(event)
        elif event.what == "committed":
            self._note_commit(event)
        elif event.what == "ended":
            return self._note_end(event)
        return False

    def _note_commit(self, event: Event) -> None:
        self._last_sign = time.monotonic()
        self._stateful.add(event.pid)
        self._result.steps = max(self._result.steps, event.data["step"])
        if event.slot == 0 and not math.isnan(event.data["loss"]):
            self._result.losses.append(event.data["loss"])
        incident = self._incident
        if incident is None or event.at < incident.last_fault_at:
            return
        if event.pid == self._job.current[event.slot].pid and event.data["world_size"] == self._config.ranks:
            incident.committed.add(event.slot)
        if len(incident.committed) < self._config.ranks:
            return
        self._tell(f"all {self._config.ranks} go on, after {event.at - incident.begun_at:.2f} s")
        if incident.kinds:
            self._result.recovered.append(Recovered(event.at - incident.begun_at, incident.kinds))
        else:
            self._at(self._config.seconds, self._end_soon)
        self._incident = None
        self._next_fault()

    def _note_end(self, event: Event) -> bool:
        code = event.data["code"]
        current = event.pid == self._job.current[event.slot].pid
        if code == 0 and self._over and current:
            return True
        if event.pid not in self._doomed:
            self._result.problems.append(
                f"slot {event.slot} ended by itself, with exit code {code}{self._job.report()}"
            )
        if current:
            self._job.start(event.slot)
        return False

    # What is done to them.

    def _next_fault(self) -> None:
        self._at(self._random.uniform(0.0, 2 * self._config.every), self._strike)

    def _victims(self) -> list[Worker]:
        """Processes that may be struck: one that has the state stays."""
        live = [worker for worker in self._job.current.values() if not worker.ended and not worker.frozen]
        live = [worker for worker in live if worker.pid not in self._doomed]
        safe = {worker.pid for worker in live} & self._stateful
        return [worker for worker in live if safe - {worker.pid}]

    def _strike(self) -> None:
        victims = self._victims()
        if self._over:
            return
        if not victims:  # still starting
            self._next_fault()
            return
        worker = self._random.choice(victims)
        kind = self._choose_kind(worker)
        self._result.faults[kind] += 1
        frozen_for = FROZEN_TIMEOUTS * self._config.timeout
        if kind in ENDING:
            self._doomed.add(worker.pid)
            at = worker.send(signal.SIGKILL if kind == "kill" else signal.SIGTERM)
            again = self._random.uniform(0.0, 4.0)
        else:
            at = worker.send(signal.SIGSTOP)
            then = {"freeze": self._thaw, "freeze-kill": self._kill, "usurp": self._usurp}[kind]
            self._at(frozen_for, lambda: then(worker))
            again = self._random.uniform(frozen_for - 2.0, frozen_for + 2.0)
        self._last_sign = at
        self._tell(f"{kind} slot {worker.slot}")
        incident = self._open_incident(kind, at)
        if len(incident.kinds) < MOST_PER_INCIDENT and self._random.random() < STRIKE_AGAIN:
            self._at(again, self._strike_if_open)

    def _choose_kind(self, worker: Worker) -> str:
        """A kind that can be survived: who waits for a frozen process as well as a new one may do so for too long."""
        kinds = [kind for kind in self._config.faults if kind in ENDING or self._incident is None]
        if worker.slot == 0 and "usurp" in kinds:
            kinds.remove("usurp")  # slot 0 serves the meeting place at a port that a second process cannot have
        return self._random.choices(kinds or ["kill"], [WEIGHTS[kind] for kind in kinds] or [1])[0]

    def _open_incident(self, kind: str, at: float) -> Incident:
        if self._incident is None:
            self._incident = Incident(at, [], at)
        self._incident.kinds.append(kind)
        self._incident.last_fault_at = at
        self._incident.committed.clear()
        return self._incident

    def _strike_if_open(self) -> None:
        if self._incident is not None and self._victims():
            self._strike()

    def _thaw(self, worker: Worker) -> None:
        worker.send(signal.SIGCONT)

    def _kill(self, worker: Worker) -> None:
        self._doomed.add(worker.pid)
        worker.send(signal.SIGKILL)

    def _usurp(self, worker: Worker) -> None:
        """Its replacement comes first; then it goes on, finds out and ends by itself."""
        self._doomed.add(worker.pid)
        self._usurped.append(worker)
        self._job.start(worker.slot)
        self._at(self._config.timeout / 2, lambda: self._thaw(worker))

    def _check_usurped(self, worker: Worker) -> None:
        self._thaw(worker)
        try:
            code = worker.process.wait(2 * self._config.timeout)
        except subprocess.TimeoutExpired:
            code = 0
        if code == 0:
            self._result.problems.append(
                f"slot {worker.slot}: a process whose place was taken did not end with an error"
            )

    # The end.

    def _end_soon(self) -> None:
        """Says after which step the training ends: one that nobody can have reached before it knows."""
        self._over = True
        if self._incident is not None:
            self._at(0.2, self._end_soon)
            return
        margin = 20 + math.ceil(1.0 / self._config.pace)
        last = (self._result.steps + margin) // DIGEST_STEPS * DIGEST_STEPS + 1
        write_steps(self._steps_file, last)


def write_steps(path: Path, steps: int) -> None:
    """As a whole or not at all: the workers look at any time."""
    fresh = path.with_suffix(".new")
    fresh.write_text(str(steps))
    fresh.rename(path)


def run_undisturbed(config: SoakConfig, steps: int, folder: Path) -> SoakResult:
    """The same training, at full speed, without faults."""
    steps_file = folder / "undisturbed-steps"
    write_steps(steps_file, steps)
    result = SoakResult(steps=steps)
    finished: set[int] = set()
    options = config.options("rejoin", folder / "undisturbed-checkpoints")
    with FaultJob(config.ranks, config.arguments(steps_file, 0.0), options) as job:
        job.start_all()
        while len(finished) < config.ranks:
            event = job.next_event(config.patience)
            if event is None or (event.what == "ended" and event.data["code"] != 0):
                raise FaultJobError(f"the undisturbed run failed{job.report()}")
            if event.what == "digest":
                result.note_digest(event)
            elif event.what == "ended":
                finished.add(event.slot)
    return result


def run_soak(config: SoakConfig) -> SoakResult:
    """With faults and, for rejoin, without."""
    with tempfile.TemporaryDirectory(prefix="poseidon-soak-") as name:
        folder = Path(name)
        steps_file = folder / "steps"
        arguments = config.arguments(steps_file, config.pace)
        options = config.options(config.on_failure, folder / "checkpoints")
        with FaultJob(config.ranks, arguments, options) as job:
            result = Soak(config, job, steps_file).run()
        if config.on_failure == "rejoin" and not any(problem.startswith("hang") for problem in result.problems):
            result.compare(run_undisturbed(config, max(result.digests, default=0) + 1, folder))
    return result


def spread(recovered: Sequence[Recovered]) -> dict[str, float]:
    """How long recoveries took, in seconds."""
    seconds = sorted(one.seconds for one in recovered)
    if not seconds:
        return {"count": 0}
    slow = seconds[min(len(seconds) - 1, math.ceil(0.95 * len(seconds)) - 1)]
    return {"count": len(seconds), "median": median(seconds), "95%": slow, "max": seconds[-1]}


def document(config: SoakConfig, result: SoakResult) -> dict[str, object]:
    """The result for machines."""
    ended = [one for one in result.recovered if set(one.kinds) <= ENDING]
    frozen = [one for one in result.recovered if not set(one.kinds) <= ENDING]
    return {
        "ranks": config.ranks,
        "on_failure": config.on_failure,
        "optimizer": config.optimizer,
        "seed": config.seed,
        "timeout": config.timeout,
        "steps": result.steps,
        "faults": dict(result.faults),
        "recoveries_from_ended": spread(ended),
        "recoveries_from_frozen": spread(frozen),
        "digests": len(result.digests),
        "compared": result.compared,
        "first_loss": result.losses[0] if result.losses else None,
        "last_loss": result.losses[-1] if result.losses else None,
        "problems": result.problems,
    }


def print_result(config: SoakConfig, result: SoakResult) -> None:
    """The result for people."""
    facts = document(config, result)
    faults = ", ".join(f"{count} {kind}" for kind, count in sorted(result.faults.items()))
    print(f"{config.ranks} ranks, {config.on_failure}, {config.optimizer}, seed {config.seed}: {result.steps} steps")
    print(f"faults: {result.faults.total()} ({faults})")
    for title, key in (
        ("processes that ended", "recoveries_from_ended"),
        ("frozen ones, too", "recoveries_from_frozen"),
    ):
        times = facts[key]
        assert isinstance(times, dict)
        text = ", ".join(f"{name} {value:.2f} s" for name, value in times.items() if name != "count")
        print(f"recoveries, {title}: {times['count']} {text}")
    print(f"states compared with the undisturbed run: {result.compared} of {len(result.digests)}")
    for problem in result.problems:
        print(f"PROBLEM: {problem}")
    print("no hang, no wrong bit" if not result.problems else f"{len(result.problems)} problems")


def parse_arguments() -> tuple[SoakConfig, bool]:
    """The run, and whether its result is for machines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--on-failure", choices=["rejoin", "shrink"], default="rejoin")
    parser.add_argument("--optimizer", choices=["sgd", "adam", "overlap", "server"], default="sgd")
    parser.add_argument("--seed", type=int, default=1, help="of the training and the faults")
    parser.add_argument("--timeout", type=float, default=15.0, help="Poseidon's; twice a restart or more")
    parser.add_argument("--every", type=float, default=3.0, help="mean seconds between a recovery and the next fault")
    parser.add_argument("--faults", default=",".join(WEIGHTS), help="kinds, separated by commas")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    faults = tuple(arguments.faults.split(","))
    if unknown := set(faults) - set(WEIGHTS):
        parser.error(f"unknown faults: {', '.join(sorted(unknown))}")
    if arguments.ranks < 2:
        parser.error("with one rank nobody is left to recover from")
    config = SoakConfig(
        seconds=60 * arguments.minutes,
        ranks=arguments.ranks,
        on_failure=arguments.on_failure,
        optimizer=arguments.optimizer,
        seed=arguments.seed,
        timeout=arguments.timeout,
        every=arguments.every,
        faults=faults,
    )
    return config, arguments.json


def main() -> int:
    """The exit status."""
    config, as_json = parse_arguments()
    result = run_soak(config)
    if as_json:
        print(json.dumps(document(config, result), indent=2))
    else:
        print_result(config, result)
    return 1 if result.problems else 0


if __name__ == "__main__":
    sys.exit(main())
