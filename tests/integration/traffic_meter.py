"""How fast a device of a testbed receives, seen from inside its namespace.

A copy's own rate counts from its first byte, which is late where others fill the port: rates of copies do not add up.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from waiting import IN_PROGRAMS, end

# For tests that judge rates or shares of rates. What else runs on the machine lowers them, so a failure counts only
# when it comes three times in a row.
judges_rates = pytest.mark.flaky(reruns=2, only_rerun="AssertionError")

# Prints the bits per second at which a device receives between two counts of bytes since the start.
METER = """
import time
def received():
    with open(f"/sys/class/net/{sys.argv[1]}/statistics/rx_bytes") as counter:
        return int(counter.read())
before, seen = received(), []
print("ready", flush=True)
for limit in map(int, sys.argv[2:]):
    wait_until(lambda: received() - before >= limit, f"{limit} bytes", every=0.002)
    seen.append((received(), time.monotonic()))
(first, start), (last, end) = seen
print(8 * (last - first) / (end - start))
"""


@contextmanager
def metered(namespace: str, device: str, byte_count: int) -> Iterator[list[float]]:
    """Afterwards the list has the bits per second at which `device` received the middle of `byte_count` bytes."""
    command = ["ip", "netns", "exec", namespace, sys.executable, "-c", IN_PROGRAMS + METER, device]
    limits = [str(byte_count * percent // 100) for percent in (10, 90)]
    rates: list[float] = []
    with subprocess.Popen([*command, *limits], stdout=subprocess.PIPE, text=True) as meter:
        assert meter.stdout is not None
        assert meter.stdout.readline() == "ready\n"
        try:
            yield rates
        except BaseException:
            end(meter)
            raise
        rates.append(float(meter.stdout.readline()))
