#!/usr/bin/env python3
"""The figures of docs/reliability.md, measured and judged: `python bench/reliability.py [--only TEXT]`.

It uses real processes on this machine, which should be quiet. Cut links need root and iproute2. Times are those of the
slowest worker. Of several repetitions it shows the worst; for recoveries and costs it shows the median.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import poseidon
from faults.job import Event, FaultJob, FaultJobError, SlotProcess
from poseidon._core import tls_available
from poseidon.launch import free_port
from poseidon.testbed import Host, Testbed
from poseidon.testbed.network import missing_requirements

START_SECONDS = 120.0  # in which all workers have to be there
SETTLE_SECONDS = 0.5  # between the first exchange and the fault
DETECTION_BAR = 1.0
UNREACHABLE_BAR = 1.5
FROZEN_BAR = 5.0
PATIENCE_SECONDS = 20.0  # for what has to be told
TIMER_SHARE = 1.05  # of the timeout: when it is over, it has to be noticed
SECRET = "a secret of this benchmark alone"
CONNECTIONS = {"flows": 16, "priority_classes": 4}  # of one worker to one core


@dataclass(frozen=True)
class Setting:
    """What the command line chose. timeout: of Poseidon, where silence has to be noticed, in seconds."""

    ranks: int
    repeats: int
    timeout: float
    width: int


@dataclass(frozen=True)
class Figure:
    """One line. bar: at most; None: there is none."""

    title: str
    what: str
    value: float
    unit: str
    bar: float | None = None

    @property
    def met(self) -> bool:
        """Whether the value is within the bar."""
        return self.bar is None or self.value <= self.bar

    def __str__(self) -> str:
        verdict = "" if self.bar is None else f"   ≤ {self.bar:g} {self.unit}  {'met' if self.met else 'MISSED'}"
        return f"{self.title:28} {self.what:46} {self.value:9.3f} {self.unit:6}{verdict}"


# Detection.


@dataclass(frozen=True)
class Detection:
    """How a fault was noticed: seconds until the last of the others had its error, and the host that was cut off its
    own (None: it was none); errors of others that do not name the rank."""

    seconds: float
    own_seconds: float | None
    nameless: int


def detect(
    setting: Setting,
    victim: int,
    strike: Callable[[FaultJob], float],
    arguments: Sequence[str] = (),
    testbed: Testbed | None = None,
) -> Detection:
    """One fault. strike: makes it and returns when. With a testbed the victim itself has to notice, too."""
    options = {"timeout": setting.timeout, "transport": "tcp"}
    with FaultJob(setting.ranks, ["exchange", *arguments], options, testbed=testbed) as job:
        job.start_all()
        job.wait_for("ready", range(setting.ranks), START_SECONDS)
        time.sleep(SETTLE_SECONDS)
        at = strike(job)
        told = [slot for slot in range(setting.ranks) if slot != victim or testbed is not None]
        failures = job.wait_for("failed", told, 2 * setting.timeout + 10)
        own = failures.pop(victim, None)
        nameless = sum(f"rank {victim}" not in event.data["text"] for event in failures.values())
        last = max(event.at for event in failures.values())
        return Detection(last - at, None if own is None else own.at - at, nameless)


def judge_detection(
    setting: Setting, fault: str, what: str, bar: float, measure: Callable[[int], Detection]
) -> Iterator[Figure]:
    """The worst of the repetitions, each with another victim."""
    found = [measure(repeat % setting.ranks) for repeat in range(setting.repeats)]
    title = f"{fault}, P = {setting.ranks}"
    yield Figure(title, what, max(one.seconds for one in found), "s", bar)
    own = [one.own_seconds for one in found if one.own_seconds is not None]
    if own:
        yield Figure(title, "that host knows, too", max(own), "s", bar)
    yield Figure(title, "errors of others that do not name the rank", sum(one.nameless for one in found), "", 0.0)


def kills(setting: Setting) -> Iterator[Figure]:
    """A process that dies."""
    for what, arguments in (("while they exchange", ()), ("while they compute", ("--computes",))):

        def measure(victim: int, arguments: Sequence[str] = arguments) -> Detection:
            return detect(setting, victim, lambda job: job.current[victim].send(signal.SIGKILL), arguments)

        yield from judge_detection(setting, "kill -9", f"all others know, {what}", DETECTION_BAR, measure)


def freezes(setting: Setting) -> Iterator[Figure]:
    """A process that is stopped."""

    def measure(victim: int) -> Detection:
        return detect(setting, victim, lambda job: job.current[victim].send(signal.SIGSTOP))

    yield from judge_detection(setting, "SIGSTOP", "all others know", TIMER_SHARE * setting.timeout, measure)


Cut = Callable[[Sequence[Host], int], None]


def take_down(hosts: Sequence[Host], victim: int) -> None:
    """Takes the host's device down: nothing leaves and nothing arrives."""
    subprocess.run(["ip", "-n", hosts[victim].namespace, "link", "set", hosts[victim].devices[0], "down"], check=True)


def make_deaf(hosts: Sequence[Host], victim: int) -> None:
    """Makes the others send what is for the host to a card that nobody has; what it sends goes on arriving."""
    for index, host in enumerate(hosts):
        if index != victim:
            entry = [hosts[victim].address, "lladdr", "02:00:00:00:00:01", "dev", host.devices[0], "nud", "permanent"]
            subprocess.run(["ip", "-n", host.namespace, "neigh", "replace", *entry], check=True)


def detect_cut(setting: Setting, victim: int, cut: Cut) -> Detection:
    """One cut, in a network of its own."""
    with Testbed(setting.ranks, "1gbit") as testbed:

        def strike(job: FaultJob) -> float:
            at = time.monotonic()
            cut(testbed.hosts, victim)
            return at

        return detect(setting, victim, strike, testbed=testbed)


def cuts(setting: Setting) -> Iterator[Figure]:
    """A host that cannot be reached any more."""
    if missing := missing_requirements():
        print(f"cut links are not measured: that needs {' and '.join(missing)}", file=sys.stderr)
        return
    for fault, cut in (("device down", take_down), ("one-way loss", make_deaf)):

        def measure(victim: int, cut: Cut = cut) -> Detection:
            return detect_cut(setting, victim, cut)

        yield from judge_detection(setting, fault, "all others know", TIMER_SHARE * setting.timeout, measure)


# Silence: what is told before the job fails, while nobody waits.


def told_after(job: FaultJob, setting: Setting, victim: int, at: float, text: str) -> float:
    """Seconds until all others have been told of the victim."""
    others = set(range(setting.ranks)) - {victim}
    told = job.wait_for("told", others, PATIENCE_SECONDS, (text, f"rank {victim} "))
    return max(event.at for event in told.values()) - at


def silences(setting: Setting) -> Iterator[Figure]:
    """Processes that are frozen, and hosts that are cut off, while all compute. With a timeout of a minute."""

    def measure(victim: int, text: str, cut: Cut | None) -> tuple[float, float]:
        with contextlib.ExitStack() as stack:
            testbed = stack.enter_context(Testbed(setting.ranks, "1gbit")) if cut else None
            options = {"timeout": 60.0, "transport": "tcp"}
            job = stack.enter_context(FaultJob(setting.ranks, ["exchange", "--computes"], options, testbed=testbed))
            job.start_all()
            job.wait_for("ready", range(setting.ranks), START_SECONDS)
            time.sleep(4 * SETTLE_SECONDS)
            at = time.monotonic()
            if testbed is not None and cut is not None:
                cut(testbed.hosts, victim)
                return told_after(job, setting, victim, at, text), 0.0
            at = job.current[victim].send(signal.SIGSTOP)
            frozen = told_after(job, setting, victim, at, text)
            at = job.current[victim].send(signal.SIGCONT)
            return frozen, told_after(job, setting, victim, at, "is heard again")

    faults: dict[str, Cut | None] = {"SIGSTOP": None}
    if not missing_requirements():
        faults |= {"device down": take_down, "one-way loss": make_deaf}
    for fault, cut in faults.items():
        text = "has not answered" if cut else "nothing has come from"
        found = [measure(repeat % setting.ranks, text, cut) for repeat in range(setting.repeats)]
        title = f"{fault}, P = {setting.ranks}"
        bar = UNREACHABLE_BAR if cut is take_down else FROZEN_BAR  # with one-way loss it is still heard
        yield Figure(title, "all others are told while they compute", max(told for told, _ in found), "s", bar)
        if cut is None:
            yield Figure(title, "they are told that it is back", max(back for _, back in found), "s")


# Recovery.


class Training:
    """Workers that train until the end of the block, and what they said, by (process, event)."""

    def __init__(self, setting: Setting, on_failure: str, folder: Path) -> None:
        self.ranks = setting.ranks
        arguments = ["train", "--width", str(setting.width), "--steps-file", str(folder / "steps")]
        options = {"on_failure": on_failure, "timeout": 60.0}
        self.job = FaultJob(setting.ranks, arguments, options)
        self.said: dict[tuple[int, str], list[Event]] = {}

    def run_until(self, done: Callable[[], bool], seconds: float = START_SECONDS) -> None:
        """Listens. FaultJobError when it takes longer, or a worker ends that was not killed."""
        deadline = time.monotonic() + seconds
        while not done():
            event = self.job.next_event(deadline - time.monotonic())
            if event is None:
                raise FaultJobError(f"no recovery in {seconds:g} s{self.job.report()}")
            if event.what == "ended" and event.data["code"] != -signal.SIGKILL:
                raise FaultJobError(f"slot {event.slot} ended by itself{self.job.report()}")
            self.said.setdefault((event.pid, event.what), []).append(event)

    def first(self, worker: SlotProcess, what: str, after: float = 0.0) -> Event | None:
        """Its first such event after a moment."""
        return next((event for event in self.said.get((worker.pid, what), []) if event.at > after), None)

    def first_commit(self, worker: SlotProcess, world_size: int, after: float = 0.0) -> Event | None:
        """The end of its first step with so many workers that began after a moment."""
        commits = self.said.get((worker.pid, "committed"), [])
        return next((one for one in commits if one.at > after and one.data["world_size"] == world_size), None)

    def all_commit(self, slots: Sequence[int], world_size: int, after: float) -> Callable[[], bool]:
        """Whether each slot's process has completed such a step."""
        return lambda: all(self.first_commit(self.job.current[slot], world_size, after) is not None for slot in slots)

    def last_commit(self, slots: Sequence[int], world_size: int, after: float) -> float:
        """When the last of them had completed its first such step."""
        found = [self.first_commit(self.job.current[slot], world_size, after) for slot in slots]
        return max(event.at for event in found if event is not None)


def seen(event: Event | None) -> float:
    """When something happened that must have."""
    if event is None:
        raise FaultJobError("a worker left out something that it should have said")
    return event.at


def rejoin(setting: Setting, victim: int) -> dict[str, float]:
    """Seconds of the parts of one recovery with a replacement, which is started when the death is seen."""
    with tempfile.TemporaryDirectory(prefix="poseidon-reliability-") as folder:
        training = Training(setting, "rejoin", Path(folder))
        everybody = range(setting.ranks)
        with training.job as job:
            job.start_all()
            training.run_until(training.all_commit(everybody, setting.ranks, 0.0))
            time.sleep(SETTLE_SECONDS)
            old = job.current[victim]
            killed_at = old.send(signal.SIGKILL)
            training.run_until(lambda: training.first(old, "ended") is not None)
            new = job.start(victim)
            training.run_until(lambda: training.first(new, "joined") is not None)
            joined_at = seen(training.first(new, "joined"))
            training.run_until(training.all_commit(everybody, setting.ranks, joined_at))
            survivors = [job.current[slot] for slot in everybody if slot != victim]
            prepared_at, met_at = seen(training.first(new, "prepared")), seen(training.first(new, "met"))
            end = training.last_commit(everybody, setting.ranks, joined_at)
            # Who learns of it between two steps says nothing; its step did not fail.
            failures = [training.first(one, "failed", killed_at) for one in survivors]
            return {
                "all others know": max(event.at for event in failures if event is not None) - killed_at,
                "new process: start and imports": prepared_at - new.started_at,
                "meeting": met_at - prepared_at,
                "layers, agreement, state": joined_at - met_at,
                "first step": end - joined_at,
                "from the kill to a step of all": end - killed_at,
            }


def shrink(setting: Setting, victim: int) -> dict[str, float]:
    """Seconds until the others go on without a worker, and what it costs when another one joins."""
    with tempfile.TemporaryDirectory(prefix="poseidon-reliability-") as folder:
        training = Training(setting, "shrink", Path(folder))
        everybody = range(setting.ranks)
        survivors = [slot for slot in everybody if slot != victim]
        fewer = setting.ranks - 1
        with training.job as job:
            job.start_all()
            training.run_until(training.all_commit(everybody, setting.ranks, 0.0))
            time.sleep(SETTLE_SECONDS)
            killed_at = job.current[victim].send(signal.SIGKILL)
            training.run_until(training.all_commit(survivors, fewer, killed_at))
            alone_at = training.last_commit(survivors, fewer, killed_at)
            new = job.start(victim)
            training.run_until(training.all_commit(everybody, setting.ranks, alone_at))
            joined_at = training.last_commit(everybody, setting.ranks, alone_at)
            commits = [training.said[job.current[slot].pid, "committed"] for slot in survivors]
            pauses = [b.at - a.at for one in commits for a, b in itertools.pairwise(one) if a.at > alone_at]
            return {
                "from the kill to a step of the others": alone_at - killed_at,
                "a newcomer: from ready to a step of all": joined_at - seen(training.first(new, "prepared")),
                "longest pause of the others for it": max(pauses),
            }


def recoveries(setting: Setting, title: str, measure: Callable[[Setting, int], dict[str, float]]) -> Iterator[Figure]:
    """The parts of a recovery: medians over repetitions, in which other slots are struck."""
    rounds = [measure(setting, (repeat + 1) % setting.ranks) for repeat in range(setting.repeats)]
    for part in rounds[0]:
        yield Figure(f"{title}, P = {setting.ranks}", part, median(one[part] for one in rounds), "s")


# Costs.


class ServerProcess:
    """A `poseidon server` on loopback. A context manager."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "poseidon", "server", "--json", "--server-cores", "1"]
        command += ["--interfaces", "127.0.0.1", "--priority-classes", str(CONNECTIONS["priority_classes"])]
        env = {**os.environ, **variables}
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
        self.address = ""

    def __enter__(self) -> ServerProcess:
        assert self._process.stdout is not None
        decoder, text = json.JSONDecoder(), ""
        while not self.address:
            line = self._process.stdout.readline()
            if not line:
                raise FaultJobError("the server did not start")
            text += line
            try:
                self.address = decoder.decode(text)["address"]
            except ValueError:
                continue
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


# How connections are protected: what the processes are told for it.
OPEN = "without a secret"
PROTECTIONS: dict[str, dict[str, str]] = {
    OPEN: {},
    "with a secret": {"POSEIDON_SECRET": SECRET},
    "with TLS": {"POSEIDON_SECRET": SECRET, "POSEIDON_TLS": "on"},
}


def protections() -> dict[str, dict[str, str]]:
    """Those that this build has."""
    available = tls_available()
    if not available:
        print("TLS is not measured: this build has no OpenSSL", file=sys.stderr)
    return {name: variables for name, variables in PROTECTIONS.items() if available or "POSEIDON_TLS" not in variables}


def connect_seconds(address: str, job: str, variables: Mapping[str, str]) -> float:
    """What one worker's connections to a server take, until all of them may be used."""
    place = {"rank": 0, "world_size": 1, "master_addr": "127.0.0.1", "master_port": free_port()}
    protection = {"secret": variables.get("POSEIDON_SECRET"), "tls": variables.get("POSEIDON_TLS")}
    began = time.perf_counter()
    with poseidon.connect(servers=address, job=job, transport="tcp", **protection, **CONNECTIONS, **place):
        return time.perf_counter() - began


def connections(setting: Setting) -> Iterator[Figure]:
    """Connections of each kind, in turns."""
    count = CONNECTIONS["flows"] * CONNECTIONS["priority_classes"]
    kinds = protections()
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(ServerProcess(variables)) for name, variables in kinds.items()}
        for repeat in range(10 * setting.repeats):
            for name, variables in kinds.items():
                seconds[name].append(connect_seconds(servers[name].address, f"job{repeat}", variables))
    without = median(seconds[OPEN])
    for name in kinds:
        taken = median(seconds[name])
        yield Figure("connections", name, count / taken, "1/s")
        if name != OPEN:
            yield Figure("connections", f"time for one, {name} / {OPEN}", taken / without, "")


def exchange_cost(variables: Mapping[str, str]) -> tuple[float, float]:
    """Seconds, and CPU seconds of all workers, for each gigabyte that crosses between two workers."""
    size, rounds = 64 << 20, 20
    with FaultJob(
        2, ["exchange", "--bytes", str(size), "--rounds", str(rounds)], {"transport": "tcp"}, variables
    ) as job:
        job.start_all()
        measured = job.wait_for("measured", range(2), START_SECONDS).values()
        gigabytes = 2 * size * rounds / 1e9  # each worker sends half of its gradient and half of the mean
        seconds = max(event.data["seconds"] for event in measured)
        return seconds / gigabytes, sum(event.data["cpu_seconds"] for event in measured) / gigabytes


def bytes_protected(setting: Setting) -> Iterator[Figure]:
    """Exchanged gigabytes of each kind, in turns."""
    kinds = protections()
    costs: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for _ in range(setting.repeats):
        for name, variables in kinds.items():
            costs[name].append(exchange_cost(variables))
    without = median(seconds for seconds, _ in costs[OPEN])
    for name, found in costs.items():
        seconds = median(one for one, _ in found)
        yield Figure("exchanged gigabytes", name, seconds, "s/GB")
        yield Figure("exchanged gigabytes", f"{name}, CPU of both", median(cpu for _, cpu in found), "s/GB")
        if name != OPEN:
            yield Figure("exchanged gigabytes", f"time, {name} / {OPEN}", seconds / without, "")


MEASUREMENTS: dict[str, Callable[[Setting], Iterator[Figure]]] = {
    "detection: kill": kills,
    "detection: freeze": freezes,
    "detection: cut": cuts,
    "silence": silences,
    "recovery: rejoin": lambda setting: recoveries(setting, "rejoin", rejoin),
    "recovery: shrink": lambda setting: recoveries(setting, "shrink", shrink),
    "cost: connections": connections,
    "cost: bytes": bytes_protected,
}


def main() -> int:
    """The exit status: 1 if a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"measurements whose name contains this: {', '.join(MEASUREMENTS)}")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=5.0, help="Poseidon's, where silence has to be noticed")
    parser.add_argument("--width", type=int, default=2000, help="of the layers that are recovered; 2000: 4.4 million")
    arguments = parser.parse_args()
    setting = Setting(arguments.ranks, arguments.repeats, arguments.timeout, arguments.width)
    missed = False
    for name, measure in MEASUREMENTS.items():
        if arguments.only in name:
            for figure in measure(setting):
                print(figure, flush=True)
                missed |= not figure.met
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
