"""Jobs of replayed workers on hosts of a testbed, with one dedicated server whose port has a rate of its own."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch's store would warn of hosts without a name

import numpy as np
import torch

from poseidon.bench.hosts.fleet import Fleet, make_barrier, places_of, start_fleet
from poseidon.bench.hosts.measures import Counters, interface_counters
from poseidon.bench.hosts.server import start_servers
from poseidon.bench.training.connections import BUCKET_BYTES
from poseidon.bench.training.host import HostSetup, TrainingHost
from poseidon.bench.training.methods import METHODS, scaled_sizes
from poseidon.errors import PoseidonError
from poseidon.launch import free_port
from poseidon.models import ModelTable
from poseidon.testbed import Testbed

METHOD = METHODS["wfbp-ps"]
_WARMUP_STEPS = 2
_SAMPLE_SECONDS = 0.2
_FEWEST_STEPS = 2
_PATIENCE_SECONDS = 120.0  # for a step


@dataclass(frozen=True)
class Setup:
    """What is replayed. `link` is the rate of every worker's port. `server` has options of the server as text."""

    table: ModelTable
    compute_seconds: float
    scale: int
    job_count: int
    worker_count: int
    link: str
    server: Mapping[str, str]


@dataclass(frozen=True)
class JobRun:
    """What one job did in a run.

    `steps` are the seconds of those that lie in the time in which all jobs of the run had done their first steps and
    none had done all.
    `bits_per_second` is what the busier direction of the server's port carried for the job in that time: over whole
    steps, or, of a job that has ended fewer than two, while all were training.
    `digests` are of each worker's parameters at the end.
    """

    steps: list[float]
    bits_per_second: float
    digests: list[str]

    @property
    def median(self) -> float:
        """Seconds of a step. Raises PoseidonError if there was none."""
        if not self.steps:
            raise PoseidonError("a job ended no step while all were training: measure more steps (--steps)")
        return median(self.steps)


@dataclass(frozen=True)
class Sample:
    """What had passed a port at a moment of the monotonic clock."""

    at: float
    bytes: Counters


@dataclass(frozen=True)
class WorkerRun:
    """What one worker did: when its steps ended, what passed its port in a step, and what had passed it when."""

    ends: list[float]
    traffic: Counters
    samples: list[Sample]
    digest: str

    def moved(self, begin: float, end: float) -> Counters:
        """What passed its port between two moments."""
        times = [sample.at for sample in self.samples]
        received = np.interp([begin, end], times, [sample.bytes.received for sample in self.samples])
        sent = np.interp([begin, end], times, [sample.bytes.sent for sample in self.samples])
        return Counters(int(received[1] - received[0]), int(sent[1] - sent[0]))


@contextmanager
def sampling(interface: str) -> Iterator[list[Sample]]:
    """Reads the port's counters again and again; complete when it ends."""
    samples, over = [Sample(time.monotonic(), interface_counters(interface))], threading.Event()

    def watch() -> None:
        while not over.wait(_SAMPLE_SECONDS):
            samples.append(Sample(time.monotonic(), interface_counters(interface)))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield samples
    finally:
        over.set()
        watcher.join()
        samples.append(Sample(time.monotonic(), interface_counters(interface)))


class Tenant(TrainingHost):
    """One worker of one job."""

    def train(self, delay_seconds: float, step_count: int, master_port: int) -> WorkerRun | None:
        """Trains so many steps after a delay; none: it takes no part."""
        if step_count == 0:
            return None
        self._begin_again()
        time.sleep(delay_seconds)
        with sampling(self._interface) as samples:
            measured = self.run_round(METHOD, _WARMUP_STEPS, step_count, master_port)
        count = measured.counted_steps
        traffic = Counters(measured.interface.received // count, measured.interface.sent // count)
        return WorkerRun(measured.ends, traffic, samples, self._digest())

    def _begin_again(self) -> None:
        """Makes the parameters those of a new job, so that their bits at the end follow from the number of steps."""
        with torch.no_grad():
            for parameter, momentum in zip(self._resting.parameters(), self._momentum, strict=True):
                parameter.fill_(1.0)
                momentum.zero_()

    def _digest(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for parameter in self._resting.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        return digest.hexdigest()


class Tenants:
    """The running jobs and their server."""

    def __init__(self, setup: Setup, testbed: Testbed, fleet: Fleet, server: Fleet, address: str) -> None:
        """`hosts` makes it."""
        self.setup = setup
        self.testbed = testbed
        self.address = address
        self._fleet = fleet
        self._server = server

    @property
    def spare_host(self) -> int:
        """The index of the host without a worker."""
        return self.setup.job_count * self.setup.worker_count + 1

    def set_port(self, bits_per_second: float) -> None:
        """Gives the server's port another rate."""
        self.testbed.set_rate(self.spare_host - 1, f"{round(bits_per_second)}bit")

    def run(self, jobs: Mapping[int, int], delays: Sequence[float] = ()) -> dict[int, JobRun]:
        """Lets jobs train together, each so many steps, and each after its delay in seconds.

        Raises PoseidonError if they did not train at the same time.
        """
        return overlapping(self.train(jobs, delays))

    def train(self, jobs: Mapping[int, int], delays: Sequence[float] = ()) -> dict[int, list[WorkerRun]]:
        """Does what `run` does. Returns what each job's workers did."""
        each = self.setup.worker_count
        arguments = []
        for job in range(self.setup.job_count):
            delay = delays[job] if delays else 0.0
            arguments += [(delay, jobs.get(job, 0), free_port())] * each
        limit = _PATIENCE_SECONDS * (max(jobs.values()) + _WARMUP_STEPS)
        runs = self._fleet.call("train", arguments, limit)
        return {job: runs[job * each : (job + 1) * each] for job in jobs}

    def server_cpu_seconds(self) -> float:
        """Of the server so far."""
        seconds, _ = self._server.call_same("counted", timeout_seconds=_PATIENCE_SECONDS)[0]
        return float(seconds)

    def close(self) -> None:
        """Ends the jobs."""
        self._fleet.call_same("close", timeout_seconds=_PATIENCE_SECONDS)


def overlapping(runs: Mapping[int, Sequence[WorkerRun]]) -> dict[int, JobRun]:
    """What each job did while all were training. `runs` has each job's workers."""
    ends = {
        job: [max(moment) for moment in zip(*(one.ends for one in workers), strict=True)]
        for job, workers in runs.items()
    }
    began = max(one.samples[0].at for workers in runs.values() for one in workers)
    first = max(moments[0] for moments in ends.values())
    end = min(moments[-1] for moments in ends.values())
    if end <= began:
        raise PoseidonError("a job had ended before another began: measure more steps (--steps)")

    def run_of(job: int, workers: Sequence[WorkerRun]) -> JobRun:
        steps = [after - before for before, after in pairwise(ends[job]) if before >= first and after <= end]
        whole = len(steps) >= _FEWEST_STEPS
        moved = [one.traffic for one in workers] if whole else [one.moved(began, end) for one in workers]
        busier_bytes = max(sum(one.sent for one in moved), sum(one.received for one in moved))
        seconds = mean(steps) if whole else end - began
        return JobRun(steps, busier_bytes * 8 / seconds, [one.digest for one in workers])

    return {job: run_of(job, workers) for job, workers in runs.items()}


@contextmanager
def tenants(setup: Setup) -> Iterator[Tenants]:
    """Starts the hosts, the server and the jobs' workers. Needs root."""
    each = setup.worker_count
    with ExitStack() as stack:
        testbed = stack.enter_context(Testbed(setup.job_count * each + 2, setup.link))
        *places, server_place, _ = places_of(testbed)
        classes = {"priority_classes": "1", "server_cores": "1"}
        server, addresses = start_servers([server_place], {**classes, **setup.server}, _PATIENCE_SECONDS, stack)
        ports = [free_port() for _ in range(setup.job_count)]
        barriers = [make_barrier(each) for _ in range(setup.job_count)]

        def build(index: int) -> Tenant:
            job, rank = divmod(index, each)
            mine = places[job * each : (job + 1) * each]
            return Tenant(_host_setup(setup, job, addresses[0]), mine, rank, ports[job], barriers[job])

        fleet = stack.enter_context(start_fleet(places, build))
        running = Tenants(setup, testbed, fleet, server, addresses[0])
        running.train(dict.fromkeys(range(setup.job_count), 1))  # who joins later would be measured while it joins
        yield running
        running.close()


def _host_setup(setup: Setup, job: int, server: str) -> HostSetup:
    options = {
        "job": f"job-{job}",
        "servers": server,
        "transport": "tcp",
        "compute_threads": 1,
        "priority_classes": 1,
        "revise": "off",
        **scaled_sizes(setup.scale),
    }
    bucket_bytes = max(1, BUCKET_BYTES // setup.scale**2)  # unused: no method here is torch's
    return HostSetup(setup.table, setup.compute_seconds, bucket_bytes, _PATIENCE_SECONDS, options)
