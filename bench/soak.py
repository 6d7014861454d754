#!/usr/bin/env python3
"""Trains with real processes, kills and freezes them at random, and checks that nothing hangs and no bit is wrong.

    python bench/soak.py --minutes 10 --ranks 4
    python bench/soak.py --minutes 10 --ranks 4 --servers 2

The faults are these. `kill` and `term` end a process, and another takes its place at once. `freeze` stops a process for
longer than the timeout and lets it go on. `freeze-kill` stops it and then kills it. `usurp` starts its replacement
while it is stopped; when it goes on, it finds its place taken and has to end. With --servers, dedicated servers get
faults as well, but not `usurp`, because a second server cannot have the first one's address.

The soak avoids what recovery cannot survive (docs/recovery.md). It always spares at least one worker that has the
state, except with --optimizer server, where all go back to the newest version on the disk whatever happens. It never
spares servers: all of them may be lost at once, with all workers but that one. Only one process at a time is frozen,
and none while the others still recover, because waiting for a frozen process and for another one may take longer than
the timeout.

With rejoin, the state at every 20th step is compared, bit for bit, with that of the same training undisturbed. Schemes
change by measured times, so the undisturbed run takes the log of choices of the other one (docs/choice.md). With
shrink the mean is over the workers that are present, so all workers must have the same state. The exit status is 1 on a
hang, on a wrong bit, or if a process ends that was not killed. In the end servers have to end in order.
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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults.job import Event, FaultJob, FaultJobError, SlotProcess
from faults.soak_config import ENDING, FROZEN_TIMEOUTS, WEIGHTS, SoakConfig
from faults.soak_result import Recovered, SoakResult, document, print_result
from faults.worker import DIGEST_STEPS

STRIKE_AGAIN = 0.3  # share of faults after which another comes before all have recovered
MOST_PER_INCIDENT = 3
MOST_PROBLEMS = 5
# Of what was killed or asked to end: a server ends in order on SIGTERM, and a worker leaves with 143.
EXIT_CODES = {0, -signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM}
START_SECONDS = 120.0  # more for the first step: all workers import PyTorch at once


@dataclass
class Incident:
    """From a fault until every slot has committed a step that nothing has disturbed."""

    begun_at: float
    kinds: list[str]
    disturbed_at: float  # when the last fault was, or a server came back
    committed: set[int] = field(default_factory=set)  # slots that did so since then

    def disturb(self, at: float) -> None:
        """Something happened that every slot has to get over."""
        self.disturbed_at = at
        self.committed.clear()


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
        self.incident: Incident | None = Incident(time.monotonic(), [], 0.0)  # the start, without a fault
        self._stateful: set[int] = set()  # processes that have committed a step
        self._serving: set[int] = set()  # servers that listen
        self._doomed: set[int] = set()  # processes that are to end with a failure
        self._last_sign = time.monotonic() + START_SECONDS  # of life, or a fault, which needs time
        self._usurped: list[SlotProcess] = []
        self._over = False
        self._begun_at = time.monotonic()

    def run(self) -> SoakResult:
        """Until the time is over and all have ended."""
        self._job.start_all()
        finished: set[int] = set()
        while len(finished) < self._config.ranks:
            now = time.monotonic()
            if now - self._last_sign > self._config.patience:
                self._complain(f"hang: no step for {self._config.patience:g} s; incident: {self.incident}")
                break
            if len(self._result.problems) >= MOST_PROBLEMS:
                break
            event = self._job.next_event(min(self._timers[0][0] - now if self._timers else 1.0, 1.0))
            if event is not None and self.note(event):
                finished.add(event.slot)
            while self._timers and self._timers[0][0] <= time.monotonic():
                heapq.heappop(self._timers)[2]()
        else:
            for slot in self._job.servers:
                self._check_server(self._job.current[slot])
        for worker in self._usurped:
            self._check_usurped(worker)
        return self._result

    def _tell(self, text: str) -> None:
        """On standard error: a soak is long."""
        seconds = time.monotonic() - self._begun_at
        print(f"{seconds:8.1f} s, step {self._result.steps}: {text}", file=sys.stderr, flush=True)

    def _complain(self, problem: str) -> None:
        self._tell(problem)
        self._result.problems.append(f"{problem}{self._job.report()}")

    def _at(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), action))

    # What they say.

    def note(self, event: Event) -> bool:
        """Takes in what a process says; True when a slot has finished its training."""
        if event.what == "digest":
            self._result.note_digest(event, self._config.on_failure)
        elif event.what == "choices":
            self._result.note_choices(event)
        elif event.what == "committed":
            self._note_commit(event)
        elif event.what == "serving":
            self._serving.add(event.pid)
            self._note_return(event.at)
        elif event.what == "ended":
            return self._note_end(event)
        return False

    def _note_commit(self, event: Event) -> None:
        self._last_sign = time.monotonic()
        self._stateful.add(event.pid)
        self._result.steps = max(self._result.steps, event.data["step"])
        if event.slot == 0 and not math.isnan(event.data["loss"]):
            self._result.losses.append(event.data["loss"])
        incident = self.incident
        if incident is None or event.at < incident.disturbed_at or not self._servers_are_up():
            return
        # One that was asked to end goes on for a step, and is still to be replaced.
        current = event.pid == self._job.current[event.slot].pid and event.pid not in self._doomed
        if current and event.data["world_size"] == self._config.ranks:
            incident.committed.add(event.slot)
        if len(incident.committed) < self._config.ranks:
            return
        self._tell(f"all {self._config.ranks} go on, after {event.at - incident.begun_at:.2f} s")
        if incident.kinds:
            self._result.recovered.append(Recovered(event.at - incident.begun_at, incident.kinds))
        else:
            self._at(self._config.seconds, self._end_soon)
        self.incident = None
        self._next_fault()

    def _servers_are_up(self) -> bool:
        """Before, a step that is committed may be one whose results were there when a server was struck."""
        servers = [self._job.current[slot] for slot in self._job.servers]
        return all(one.pid in self._serving and one.pid not in self._doomed and not one.frozen for one in servers)

    def _note_return(self, at: float) -> None:
        """Of a server."""
        if self.incident is not None:
            self.incident.disturb(at)

    def _note_end(self, event: Event) -> bool:
        code = event.data["code"]
        current = event.pid == self._job.current[event.slot].pid
        if code == 0 and self._over and current and event.slot not in self._job.servers:
            return True
        usurped = any(event.pid == worker.pid for worker in self._usurped)
        if event.pid not in self._doomed or not (usurped or code in EXIT_CODES):
            self._complain(f"{self._job.name(event.slot)} ended by itself, with exit code {code}")
        for pids in (self._doomed, self._stateful, self._serving):
            pids.discard(event.pid)  # another process may get the number
        if current:
            self._job.start(event.slot)
        return False

    # What is done to them.

    def _next_fault(self) -> None:
        if self._config.faults:
            self._at(self._random.uniform(0.0, 2 * self._config.every), self._strike)

    def _victims(self) -> list[SlotProcess]:
        """Processes that may be struck: one worker that has the state stays, unless the disk has it."""
        live = [worker for worker in self._job.current.values() if not worker.ended and not worker.frozen]
        live = [worker for worker in live if worker.pid not in self._doomed]
        if self._config.optimizer == "server":
            return live
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
        self._result.faults[f"{kind} server" if worker.slot in self._job.servers else kind] += 1
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
        self._tell(f"{kind} {self._job.name(worker.slot)}")
        incident = self._open_incident(kind, at)
        if len(incident.kinds) < MOST_PER_INCIDENT and self._random.random() < STRIKE_AGAIN:
            self._at(again, lambda: self._strike_again(incident))

    def _choose_kind(self, worker: SlotProcess) -> str:
        """A kind that can be survived: who waits for a frozen process as well as a new one may do so for too long."""
        kinds = [kind for kind in self._config.faults if kind in ENDING or self.incident is None]
        if worker.slot in (0, *self._job.servers) and "usurp" in kinds:
            kinds.remove("usurp")  # slot 0 serves the meeting place at a port that a second process cannot have, either
        return self._random.choices(kinds or ["kill"], [WEIGHTS[kind] for kind in kinds] or [1])[0]

    def _open_incident(self, kind: str, at: float) -> Incident:
        if self.incident is None:
            self.incident = Incident(at, [], at)
        self.incident.kinds.append(kind)
        self.incident.disturb(at)
        return self.incident

    def _strike_again(self, incident: Incident) -> None:
        if self.incident is incident and self._victims():
            self._strike()

    def _thaw(self, worker: SlotProcess) -> None:
        at = worker.send(signal.SIGCONT)
        if worker.slot in self._job.servers:
            self._note_return(at)

    def _kill(self, worker: SlotProcess) -> None:
        self._doomed.add(worker.pid)
        worker.send(signal.SIGKILL)

    def _usurp(self, worker: SlotProcess) -> None:
        """Its replacement comes first; then it goes on, finds out and ends by itself."""
        self._doomed.add(worker.pid)
        self._usurped.append(worker)
        self._job.start(worker.slot)
        self._at(self._config.timeout / 2, lambda: self._thaw(worker))

    def _check_usurped(self, worker: SlotProcess) -> None:
        self._thaw(worker)
        if not self._exit_code(worker):
            self._complain(f"slot {worker.slot}: a process whose place was taken did not end with an error")

    def _check_server(self, server: SlotProcess) -> None:
        server.send(signal.SIGTERM)
        code = self._exit_code(server)
        if code != 0:
            self._complain(f"{self._job.name(server.slot)} did not end in order on SIGTERM: exit code {code}")

    def _exit_code(self, worker: SlotProcess) -> int | None:
        """None: it does not end."""
        try:
            return worker.process.wait(2 * self._config.timeout)
        except subprocess.TimeoutExpired:
            return None

    # The end.

    def _end_soon(self) -> None:
        """Says after which step the training ends: one that nobody can have reached before it knows."""
        self._over = True
        if self.incident is not None:
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


def run_undisturbed(config: SoakConfig, steps: int, choices: list[dict[str, Any]], folder: Path) -> SoakResult:
    """The same training with the same choices of schemes, at full speed, without faults."""
    steps_file = folder / "undisturbed-steps"
    write_steps(steps_file, steps)
    result = SoakResult(steps=steps)
    finished: set[int] = set()
    options = config.options("rejoin", folder / "undisturbed-checkpoints") | {"revise": "off"}
    log = folder / "choices"
    log.write_text(json.dumps(choices))
    arguments = [*config.arguments(steps_file, 0.0), "--choices", str(log)]
    with FaultJob(config.ranks, arguments, options, servers=config.servers) as job:
        job.start_all()
        while len(finished) < config.ranks:
            event = job.next_event(config.patience)
            if event is None or (event.what == "ended" and event.data["code"] != 0):
                raise FaultJobError(f"the undisturbed run failed{job.report()}")
            if event.what == "digest":
                result.note_digest(event, "rejoin")
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
        with FaultJob(config.ranks, arguments, options, config.variables(), servers=config.servers) as job:
            result = Soak(config, job, steps_file).run()
        if config.on_failure == "rejoin" and not any(problem.startswith("hang") for problem in result.problems):
            if result.choices is None:
                result.problems.append("no worker has said which schemes were chosen")
            else:
                steps = max(result.digests, default=0) + 1
                result.compare(run_undisturbed(config, steps, result.choices, folder))
    return result


def parse_arguments() -> tuple[SoakConfig, bool]:
    """The run, and whether its result is for machines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--servers", type=int, default=0, help="that stand alone; 0: they are within the workers")
    parser.add_argument("--on-failure", choices=["rejoin", "shrink"], default="rejoin")
    parser.add_argument("--optimizer", choices=["sgd", "adam", "overlap", "server"], default="sgd")
    parser.add_argument("--seed", type=int, default=1, help="of the training and the faults")
    parser.add_argument("--timeout", type=float, default=15.0, help="Poseidon's; twice a restart or more")
    parser.add_argument("--every", type=float, default=3.0, help="mean seconds between a recovery and the next fault")
    parser.add_argument("--faults", default=",".join(WEIGHTS), help="kinds, separated by commas; none: no faults")
    parser.add_argument(
        "--children", type=int, default=0, help="workers of a DataLoader, and as many other forks, each"
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    faults = () if arguments.faults == "none" else tuple(arguments.faults.split(","))
    if unknown := set(faults) - set(WEIGHTS):
        parser.error(f"unknown faults: {', '.join(sorted(unknown))}")
    if arguments.ranks < 2:
        parser.error("with one rank nobody is left to recover from")
    config = SoakConfig(
        seconds=60 * arguments.minutes,
        ranks=arguments.ranks,
        servers=arguments.servers,
        on_failure=arguments.on_failure,
        optimizer=arguments.optimizer,
        seed=arguments.seed,
        timeout=arguments.timeout,
        every=arguments.every,
        faults=faults,
        children=arguments.children,
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
