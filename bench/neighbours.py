#!/usr/bin/env python3
"""What a job on a shared server loses to its neighbour: `python bench/neighbours.py`.

One server with one core serves two jobs of one worker each over TCP on loopback. The first job exchanges large chunks.
Its neighbour, in turns, does nothing, does the same, or floods the server with tiny messages (chunks of 64 bytes).

The result is the median over the rounds of throughput beside the flood / beside an equal, and the bar is 0.8: jobs
share a core's time, however small their messages are. If there are two processor cores, the server has one of them, so
that the jobs share its time and not that of the workers. The exit status is 1 if the bar is missed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from multiprocessing.synchronize import Event
from statistics import median

import numpy as np

import poseidon
from poseidon._core import Server
from poseidon.bench.hosts.fleet import LOOPBACK, Fleet, start_fleet
from poseidon.launch import free_port
from poseidon.options import resolve

BAR = 0.8
PATIENCE_SECONDS = 120.0
CALIBRATION_STEPS = 20
LARGE = 256 << 10
TINY = 64
NEIGHBOURS = ("idle", "equal", "flood")


def stay_on(server: bool) -> None:
    """Keeps this process on the server's processor core, or off it."""
    first, *others = sorted(os.sched_getaffinity(0))
    if others:
        os.sched_setaffinity(0, {first} if server else others)


class Host:
    """The server's process."""

    def __init__(self) -> None:
        stay_on(server=True)
        self._server = Server.listen(resolve(interfaces=["127.0.0.1"], server_cores=1).core(), 0)

    def join(self, address: str) -> str:
        """Where it listens."""
        return address or self._server.address

    def run(self, neighbour: str, step_count: int) -> float:
        """Takes no part."""
        return 0.0


class Client:
    """A job of one worker: the one that is measured, or its neighbour."""

    def __init__(self, name: str, size_bytes: int, done: Event) -> None:
        stay_on(server=False)
        self._name = name
        self._gradient = np.ones(size_bytes // 4, np.float32)
        self._done = done
        self._exchanges: dict[int, poseidon.Exchange] = {}  # by chunk size

    def join(self, address: str) -> str:
        """Connects to the server at `address`, if it is known."""
        for chunk_bytes in (LARGE,) if self._name == "measured" else (LARGE, TINY):
            if address:
                self._exchanges[chunk_bytes] = exchange = poseidon.connect(
                    rank=0,
                    world_size=1,
                    master_port=free_port(),
                    job=f"{self._name}-{chunk_bytes}",
                    servers=[address],
                    chunk_bytes=chunk_bytes,
                )
                exchange.declare({"gradient": self._gradient})
        return ""

    def run(self, neighbour: str, step_count: int) -> float:
        """Seconds for so many steps; of the neighbour: works until the other has done them."""
        if self._name == "measured":
            start = time.perf_counter()
            for _ in range(step_count):
                self._exchanges[LARGE].push_pull("gradient", self._gradient)
            seconds = time.perf_counter() - start
            self._done.set()
            return seconds
        exchange = self._exchanges[TINY if neighbour == "flood" else LARGE]
        while neighbour != "idle" and not self._done.is_set():
            exchange.push_pull("gradient", self._gradient)
        return 0.0


def measure(fleet: Fleet, done: Event, neighbour: str, step_count: int) -> float:
    """Seconds of the measured job's steps beside this neighbour."""
    done.clear()
    return max(fleet.call_same("run", neighbour, step_count, timeout_seconds=PATIENCE_SECONDS))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="of each neighbour")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement, beside an idle neighbour")
    parser.add_argument("--mib", type=int, default=4, help="that every step exchanges")
    arguments = parser.parse_args()

    size_bytes = arguments.mib << 20
    done = multiprocessing.get_context("fork").Event()
    roles = [Host, lambda: Client("measured", size_bytes, done), lambda: Client("neighbour", size_bytes, done)]
    with start_fleet([LOOPBACK] * len(roles), lambda rank: roles[rank]()) as fleet:
        address = fleet.call_same("join", "", timeout_seconds=PATIENCE_SECONDS)[0]
        fleet.call_same("join", address, timeout_seconds=PATIENCE_SECONDS)
        seconds = measure(fleet, done, "idle", CALIBRATION_STEPS)
        steps = max(1, round(CALIBRATION_STEPS * arguments.seconds / seconds))
        print(f"{arguments.mib} MiB a step, {steps} steps; MB/s of the measured job beside a neighbour")
        print(f"{'round':>5} " + " ".join(f"{name:>9}" for name in NEIGHBOURS) + f" {'flood / equal':>14}")
        ratios = []
        for number in range(1, arguments.rounds + 1):
            taken = {neighbour: measure(fleet, done, neighbour, steps) for neighbour in NEIGHBOURS}
            ratios.append(taken["equal"] / taken["flood"])
            rates = [f"{steps * size_bytes / taken[neighbour] / 1e6:9.0f}" for neighbour in NEIGHBOURS]
            print(f"{number:5} " + " ".join(rates) + f" {ratios[-1]:14.3f}", flush=True)
    met = median(ratios) >= BAR
    print(f"median {median(ratios):.3f}, bar {BAR}: {'met' if met else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
