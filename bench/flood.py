#!/usr/bin/env python3
"""Whether connections without the secret slow a running job down: `python bench/flood.py [--workers N] [--rate R]`.

A job of N workers exchanges over TCP on loopback, in turns undisturbed and under a flood. The flood is one process at
the lowest priority. It opens R connections a second to every kind of port on which the job listens, and keeps up to 512
of them open. A quarter of the connections is of each of these kinds:

    silent   sends nothing
    garbage  sends 4 KiB of random bytes
    drip     sends one byte of a valid beginning each second
    huge     sends a valid beginning and then headers that promise 16 GiB

The result is the median over the rounds of throughput under flood / undisturbed, and the bar is 0.95. The flood uses
the same cores, so its own processor time is shown, too. The exit status is 1 if the bar is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import secrets
import selectors
import socket
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import median

import numpy as np

import poseidon
from poseidon.bench.hosts.fleet import LOOPBACK, Fleet, start_fleet
from poseidon.launch import free_port

BAR = 0.95
PATIENCE_SECONDS = 120.0
CALIBRATION_STEPS = 20
MOST_OPEN = 512
TICK_SECONDS = 0.01
LISTENING = "0A"  # in /proc/net/tcp


def listening_ports() -> list[int]:
    """TCP ports that this process listens on."""
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(os.readlink(descriptor))
    ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and f"socket:[{fields[9]}]" in own:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return sorted(ports)


class Rank:
    """One rank of the job."""

    def __init__(self, rank: int, world_size: int, port: int, secret: str, size_bytes: int) -> None:
        self._exchange = poseidon.connect(
            rank=rank,
            world_size=world_size,
            master_addr="127.0.0.1",
            master_port=port,
            transport="tcp",
            timeout=PATIENCE_SECONDS,
            secret=secret,
        )
        self._gradient = np.ones(size_bytes // 4, np.float32)
        self._exchange.declare({"gradient": self._gradient})

    def ports(self) -> list[int]:
        """Where unauthenticated connections can reach this process."""
        return listening_ports()

    def run(self, step_count: int) -> float:
        """Seconds that so many steps take."""
        self._exchange.barrier()
        start = time.perf_counter()
        for _ in range(step_count):
            self._exchange.push_pull("gradient", self._gradient)
        return time.perf_counter() - start

    def close(self) -> None:
        """Leaves the job."""
        self._exchange.close()


@dataclass
class FloodReport:
    """What the flood did in one round."""

    opened: int = 0
    refused: int = 0  # could not be opened
    closed: int = 0  # by the other side
    cpu_seconds: float = 0.0
    seconds: float = 0.0


@dataclass
class Guest:
    """One of the flood's connections."""

    socket: socket.socket
    kind: str
    drops: deque[bytes] = field(default_factory=deque)  # of a drip: what it will send
    next_drop: float = 0.0


def beginnings() -> dict[str, bytes]:
    """What each kind sends at once."""
    opening = b"PSA1\x01\x01\0\0" + secrets.token_bytes(40)  # of a handshake, docs/wire-format.md
    header = struct.pack("<IBBHQQIIIB27x", 0x31445350, 3, 2, 0, 1 << 34, 1, 0, 1, 4, 1)
    assert len(header) == 64
    return {"silent": b"", "garbage": secrets.token_bytes(4096), "drip": b"", "huge": opening + 16 * header}


class Flood:
    """Opens connections at a steady rate until it is told to stop."""

    def __init__(self, ports: list[int], rate: float) -> None:
        self._ports = ports
        self._rate = rate
        self._guests: deque[Guest] = deque()  # the oldest first
        self._selector = selectors.DefaultSelector()
        self._beginnings = beginnings()
        self.report = FloodReport()

    def run(self, stop: Event) -> FloodReport:
        """Floods until `stop` is set."""
        start = time.perf_counter()
        cpu = time.process_time()
        while not stop.is_set():
            elapsed = time.perf_counter() - start
            while self.report.opened + self.report.refused < elapsed * self._rate:
                self._open()
            self._work()
            time.sleep(TICK_SECONDS)
        self.report.seconds = time.perf_counter() - start
        self.report.cpu_seconds = time.process_time() - cpu
        while self._guests:
            self._dismiss(self._guests[0])
        return self.report

    def _open(self) -> None:
        number = self.report.opened + self.report.refused
        kind = list(self._beginnings)[number % len(self._beginnings)]
        port = self._ports[number // len(self._beginnings) % len(self._ports)]
        connection = socket.socket()
        connection.settimeout(1.0)
        try:
            connection.connect(("127.0.0.1", port))
            connection.setblocking(False)
            connection.send(self._beginnings[kind])
        except OSError:
            connection.close()
            self.report.refused += 1
            return
        self.report.opened += 1
        guest = Guest(connection, kind)
        if kind == "drip":
            guest.drops = deque(bytes([byte]) for byte in self._beginnings["huge"][:64])
        self._guests.append(guest)
        self._selector.register(connection, selectors.EVENT_READ, guest)
        if len(self._guests) > MOST_OPEN:
            self._dismiss(self._guests[0])

    def _work(self) -> None:
        """Lets the drips drip, and notices who has been turned away."""
        now = time.perf_counter()
        for key, _ in self._selector.select(0):
            guest: Guest = key.data
            try:
                closed = not guest.socket.recv(1 << 16)
            except BlockingIOError:
                continue
            except OSError:
                closed = True
            if closed:
                self.report.closed += 1
                self._dismiss(guest)
        for guest in [guest for guest in self._guests if guest.drops and guest.next_drop <= now]:
            guest.next_drop = now + 1.0
            try:
                guest.socket.send(guest.drops.popleft())
            except OSError:
                self.report.closed += 1
                self._dismiss(guest)

    def _dismiss(self, guest: Guest) -> None:
        self._guests.remove(guest)
        self._selector.unregister(guest.socket)
        guest.socket.close()


def flood(ports: list[int], rate: float, stop: Event, reports: multiprocessing.Queue[FloodReport]) -> None:
    """The flood's process."""
    os.nice(19)
    reports.put(Flood(ports, rate).run(stop))


def run_round(fleet: Fleet, ports: list[int], rate: float, step_count: int) -> tuple[float, float, FloodReport]:
    """Seconds of as many steps undisturbed and under flood, and what the flood did."""
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    reports: multiprocessing.Queue[FloodReport] = context.Queue()
    calm = max(fleet.call_same("run", step_count, timeout_seconds=PATIENCE_SECONDS))
    process = context.Process(target=flood, args=(ports, rate, stop, reports), daemon=True)
    process.start()
    try:
        time.sleep(0.5)  # until it is under way
        flooded = max(fleet.call_same("run", step_count, timeout_seconds=PATIENCE_SECONDS))
    finally:
        stop.set()
    report = reports.get(timeout=PATIENCE_SECONDS)
    process.join()
    return calm, flooded, report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rate", type=float, default=200.0, help="connections per second")
    parser.add_argument("--rounds", type=int, default=7, help="of each: undisturbed, under flood")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each half of a round")
    parser.add_argument("--mib", type=int, default=16, help="that every step exchanges")
    arguments = parser.parse_args()

    size_bytes = arguments.mib << 20
    port, secret = free_port(), secrets.token_hex(32)
    with start_fleet(
        [LOOPBACK] * arguments.workers, lambda rank: Rank(rank, arguments.workers, port, secret, size_bytes)
    ) as fleet:
        ports = sorted({one for own in fleet.call_same("ports", timeout_seconds=PATIENCE_SECONDS) for one in own})
        steps = CALIBRATION_STEPS
        seconds = max(fleet.call_same("run", steps, timeout_seconds=PATIENCE_SECONDS))
        steps = max(1, round(steps * arguments.seconds / seconds))
        print(
            f"{arguments.workers} workers, {arguments.mib} MiB a step over TCP on loopback, {steps} steps a half; "
            f"{arguments.rate:g} connections/s to {len(ports)} ports"
        )
        print(
            f"{'round':>5} {'undisturbed':>14} {'under flood':>14} {'ratio':>6} {'flood: opened':>14} "
            f"{'turned away':>11} {'its CPU':>8}"
        )
        ratios = []
        for number in range(1, arguments.rounds + 1):
            calm, flooded, report = run_round(fleet, ports, arguments.rate, steps)
            ratios.append(calm / flooded)
            rates = [f"{steps * size_bytes / taken / 1e6:9.0f} MB/s" for taken in (calm, flooded)]
            print(
                f"{number:5} {rates[0]:>14} {rates[1]:>14} {ratios[-1]:6.3f} {report.opened:14} "
                f"{report.closed:11} {report.cpu_seconds / report.seconds:7.1%}",
                flush=True,
            )
        fleet.call_same("close", timeout_seconds=PATIENCE_SECONDS)
    met = median(ratios) >= BAR
    print(f"median ratio {median(ratios):.3f}, bar {BAR}: {'met' if met else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
