#!/usr/bin/env python3
"""Exchanges between two sites that are far from each other: `python bench/long_path.py`. Needs root and /dev/net/tun.

Two network namespaces are joined by a path that delays every packet. Two workers are in one of them. Two dedicated
servers are in the other one, or in a second run each worker hosts a shard and one of the workers is in the other one.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import fcntl
import os
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch

from poseidon.bench.hosts.fleet import Place, enter_namespace, start_fleet
from poseidon.bench.hosts.server import start_servers
from poseidon.errors import PoseidonError
from poseidon.launch import free_port

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_DEVICE = "far0"
# As large as a TUN device permits, so that one Python thread carries enough of them.
_MTU = 32_000
_PACKETS_AT_ONCE = 64
_SITES = {"poseidon-near": "10.78.0.1", "poseidon-far": "10.78.0.2"}
_LAYERS, _WIDTH = 8, 1024
_TIMEOUT_SECONDS = 120.0


class Worker:
    """Trains a stack of equal layers, and measures each step."""

    def __init__(self, rank: int, options: dict[str, Any]) -> None:
        import poseidon.torch as poseidon

        self._poseidon = poseidon
        poseidon.init(rank=rank, world_size=2, timeout=_TIMEOUT_SECONDS, transport="tcp", **options)
        layers = [torch.nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_LAYERS)]
        self._model = poseidon.DistributedDataParallel(torch.nn.Sequential(*layers), scheme="ps")

    def steps(self, count: int) -> list[float]:
        """The seconds that each of `count` steps takes."""
        seconds = []
        for _ in range(count):
            start = time.monotonic()
            self._model(torch.ones(2, _WIDTH)).sum().backward()
            seconds.append(time.monotonic() - start)
        return seconds

    def close(self) -> None:
        """Leaves the job."""
        self._poseidon.shutdown()


def ip(*arguments: str) -> None:
    """Runs `ip` of iproute2."""
    subprocess.run(["ip", *arguments], check=True)


def _open_device(namespace: str, address: str) -> int:
    """Makes a TUN device in a new namespace. Returns its descriptor."""
    ip("netns", "add", namespace)
    opened: list[int] = []

    def make() -> None:
        enter_namespace(namespace)
        opened.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
        fcntl.ioctl(opened[0], _TUNSETIFF, struct.pack("16sH", _DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))

    thread = threading.Thread(target=make)  # a thread of its own, because it cannot come back from the namespace
    thread.start()
    thread.join()
    ip("-n", namespace, "addr", "add", f"{address}/24", "dev", _DEVICE)
    ip("-n", namespace, "link", "set", _DEVICE, "mtu", str(_MTU), "txqueuelen", "2000", "up")
    ip("-n", namespace, "link", "set", "lo", "up")
    return opened[0]


def _carry(ends: tuple[int, int], delay_seconds: float, stop: threading.Event) -> None:
    """Brings each packet to the other end after the delay."""
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    under_way: collections.deque[tuple[float, int, bytes]] = collections.deque()
    while not stop.is_set():
        while under_way and under_way[0][0] <= time.monotonic():
            _, end, packet = under_way.popleft()
            with contextlib.suppress(BlockingIOError):  # a full queue drops it, as a switch does
                os.write(end, packet)
        for end in select.select(ends, [], [], 0.0005 if under_way else 0.05)[0]:
            with contextlib.suppress(BlockingIOError):
                for _ in range(_PACKETS_AT_ONCE):
                    under_way.append((time.monotonic() + delay_seconds, other[end], os.read(end, 1 << 16)))


@contextlib.contextmanager
def long_path(delay_seconds: float) -> Iterator[list[Place]]:
    """Two sites, as places of a fleet."""
    with contextlib.ExitStack() as stack:
        ends = []
        for namespace, address in _SITES.items():
            stack.callback(ip, "netns", "del", namespace)
            ends.append(_open_device(namespace, address))
            stack.callback(os.close, ends[-1])
        stop = threading.Event()
        carrier = threading.Thread(target=_carry, args=((ends[0], ends[1]), delay_seconds, stop))
        carrier.start()
        stack.callback(carrier.join)
        stack.callback(stop.set)
        yield [Place(namespace, (address,), (_DEVICE,)) for namespace, address in _SITES.items()]


def measure(dedicated: bool, delay_seconds: float, steps: int) -> list[float]:
    """Rank 0's seconds of each step."""
    with contextlib.ExitStack() as stack:
        near, far = stack.enter_context(long_path(delay_seconds))
        options: dict[str, Any] = {"master_addr": near.address, "master_port": free_port(), "interfaces": _DEVICE}
        if dedicated:
            options["servers"] = ",".join(start_servers([far, far], {}, _TIMEOUT_SECONDS, stack)[1])
        workers = stack.enter_context(
            start_fleet([near, near if dedicated else far], lambda rank: Worker(rank, options))
        )
        seconds: list[float] = workers.call_same("steps", steps, timeout_seconds=_TIMEOUT_SECONDS)[0]
        workers.call_same("close", timeout_seconds=_TIMEOUT_SECONDS)
    return seconds


def main() -> int:
    """Prints the median step of both placements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--round-trip-ms", type=float, default=50.0)
    parser.add_argument("--steps", type=int, default=8, help="measured steps, after two others")
    arguments = parser.parse_args()
    size_mib = _LAYERS * _WIDTH * _WIDTH * 4 / 2**20
    print(f"{size_mib:g} MiB, 2 workers, round trips of {arguments.round_trip_ms:g} ms")
    for name, dedicated in (("2 dedicated servers", True), ("colocated", False)):
        try:
            seconds = median(measure(dedicated, arguments.round_trip_ms / 2000, arguments.steps + 2)[2:])
        except PoseidonError as error:
            print(error, file=sys.stderr)
            return 1
        print(f"{name:20} {seconds:.3f} s a step, {seconds / arguments.round_trip_ms * 1000:.1f} round trips")
    return 0


if __name__ == "__main__":
    sys.exit(main())
