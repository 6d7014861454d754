#!/usr/bin/env python3
"""A server that is restarted under running jobs: `python bench/rolling_restart.py`.

Jobs of two workers train on one `poseidon server`, in turns with the update on the workers and on the server, which
then saves versions. The server is told to end (SIGTERM) and started again at the same address, as a service manager
does it, a few times. No job may end, the longest pause of each is shown, and in the end its parameters must have the
bits of the same training alone on servers of its own, where nothing is restarted. The exit status is 1 if a bar is
missed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from faults.job import Event, FaultJob, FaultJobError

PAUSE_BAR = 2.0
WORKERS = 2
START_SECONDS = 300.0
BETWEEN_SECONDS = 6.0
PACE_SECONDS = 0.02  # of a forward pass, so that the machine has room for all
CHECKPOINT_EVERY = 10


@dataclass
class Training:
    """One job, and what its workers said: when rank 0 completed steps, and the digests of states by step."""

    name: str
    job: FaultJob
    completed: list[tuple[float, int]] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)

    def listen(self, seconds: float) -> None:
        """Takes in what is said meanwhile. FaultJobError if a worker ends, or states of one step differ."""
        deadline = time.monotonic() + seconds
        while (event := self.job.next_event(deadline - time.monotonic())) is not None:
            self._note(event)

    def _note(self, event: Event) -> None:
        if event.what == "ended":
            raise FaultJobError(f"a worker of {self.name} has ended{self.job.report()}")
        if event.what == "committed" and event.slot == 0:
            self.completed.append((event.at, event.data["step"]))
        if event.what == "digest":
            step, value = event.data["step"], event.data["value"]
            if self.digests.setdefault(step, value) != value:
                raise FaultJobError(f"{self.name}: two states of step {step}")

    def pause_after(self, at: float) -> float:
        """Seconds without a completed step, more than is usual, around a moment. Steps that are made again do not
        count as completed."""
        known = 0
        times = []
        for when, step in self.completed:
            if step > known:
                times.append(when)
                known = step
        gaps = [(later - earlier, earlier, later) for earlier, later in itertools.pairwise(times)]
        usual = median(gap for gap, _, _ in gaps)
        return max(gap for gap, earlier, later in gaps if later >= at and earlier <= at + BETWEEN_SECONDS) - usual


class Case:
    """Jobs that train with the update on the workers or on the servers, and where they put their files."""

    def __init__(self, folder: Path, index: int) -> None:
        self.name = f"job-{index}"
        self.update = ("workers", "the server")[index % 2]
        self._optimizer = ("sgd", "server")[index % 2]
        self._folder = folder
        self._index = index

    @contextlib.contextmanager
    def start(self, shared_servers: str | None, step_count: int | None = None) -> Iterator[Training]:
        """Its workers, on shared servers or on one of their own, until they have made so many steps (None: no end)."""
        place = self._folder / f"{self.name}-{'shared' if shared_servers else 'alone'}"
        place.mkdir()
        steps_file = place / "steps"
        if step_count is not None:
            steps_file.write_text(str(step_count))
        arguments = ["train", "--optimizer", self._optimizer, "--seed", str(1 + self._index)]
        arguments += ["--pace", str(PACE_SECONDS), "--steps-file", str(steps_file)]
        # With the choice by time two runs may take different schemes, which round differently.
        options = {"on_failure": "rejoin", "timeout": 60.0, "transport": "tcp", "job": self.name, "scheme": "ps"}
        if self._optimizer == "server":
            options |= {
                "checkpoint_every": CHECKPOINT_EVERY,
                "checkpoint_dir": str(self._folder / "server" if shared_servers else place),
            }
        if shared_servers:
            options["servers"] = shared_servers
        with FaultJob(WORKERS, arguments, options, servers=0 if shared_servers else 1) as job:
            job.start_all()
            yield Training(self.name, job)


def restart(holder: FaultJob) -> float:
    """As a service manager does it. Returns when the server was told to end."""
    at = holder.current[0].send(signal.SIGTERM)
    holder.current[0].process.wait(timeout=30)
    holder.start(0)
    holder.wait_for("serving", [0], START_SECONDS)
    return at


def listen_to(trainings: list[Training], seconds: float) -> None:
    """Takes in what all of them say meanwhile."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for one in trainings:
            one.listen(0.01)


def train_under_restarts(folder: Path, cases: list[Case], restart_count: int) -> tuple[list[Training], list[float]]:
    """What the jobs said, and when the server was told to end."""
    saving = {"checkpoint_dir": str(folder / "server"), "checkpoint_every": CHECKPOINT_EVERY}
    with contextlib.ExitStack() as stack:
        holder = stack.enter_context(FaultJob(0, [], saving, servers=1))
        holder.start(0)
        holder.wait_for("serving", [0], START_SECONDS)
        trainings = [stack.enter_context(case.start(holder.server_addresses)) for case in cases]
        for one in trainings:
            one.job.wait_for("joined", range(WORKERS), START_SECONDS)
        listen_to(trainings, BETWEEN_SECONDS)
        times = []
        for _ in range(restart_count):
            times.append(restart(holder))
            listen_to(trainings, 2 * BETWEEN_SECONDS)
    return trainings, times


def bits_alone(case: Case, last_step: int) -> Mapping[int, str]:
    """The digests of the same training on a server that is not restarted."""
    with case.start(None, last_step + 1) as alone:
        while last_step not in alone.digests:
            alone.listen(0.1)
    return alone.digests


def main() -> int:
    """Prints each job's longest pause, and whether its bits are those of a training alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--restarts", type=int, default=3)
    arguments = parser.parse_args()
    all_met = True
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        cases = [Case(folder, index) for index in range(arguments.jobs)]
        trainings, times = train_under_restarts(folder, cases, arguments.restarts)
        for case, one in zip(cases, trainings, strict=True):
            pause = max(one.pause_after(at) for at in times)
            alone = bits_alone(case, max(one.digests))
            same = all(alone[step] == digest for step, digest in one.digests.items())
            met = same and pause <= PAUSE_BAR
            all_met &= met
            print(
                f"{one.name}, update by {case.update}: {one.completed[-1][1]} steps, longest pause {pause:.2f} s (bar "
                f"{PAUSE_BAR:g} s), {'the bits of a training alone' if same else 'OTHER BITS'}: "
                f"{'met' if met else 'MISSED'}",
                flush=True,
            )
    return 0 if all_met else 1


if __name__ == "__main__":
    sys.exit(main())
