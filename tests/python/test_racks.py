"""`poseidon racks`: from rates between machines to racks, and the measurement on a testbed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys

import pytest

from poseidon.launch import free_port
from poseidon.options.secret import VARIABLE, fresh
from poseidon.racks.grouping import Rates, find_racks
from poseidon.testbed import Testbed, missing_requirements

missing = missing_requirements()


def rates_of(racks: list[int], within: float, between: float, spread: float = 0.0) -> list[list[float]]:
    """What machines of these racks receive from each other, off by up to `spread`."""
    chance = random.Random(1)
    return [
        [
            0.0 if one == other else (within if mine == theirs else between) * chance.uniform(1 - spread, 1 + spread)
            for other, theirs in enumerate(racks)
        ]
        for one, mine in enumerate(racks)
    ]


@pytest.mark.parametrize(
    ("racks", "machines"),
    [
        ([0, 0, 0, 0, 1, 1, 1, 1], [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ([0, 1, 0, 1, 0, 1], [[0, 2, 4], [1, 3, 5]]),
        ([0, 0, 0, 1], [[0, 1, 2], [3]]),
        ([0, 0, 1, 1, 2, 2], [[0, 1], [2, 3], [4, 5]]),
    ],
)
def test_racks_are_found(racks: list[int], machines: list[list[int]]) -> None:
    found = find_racks(rates_of(racks, 40e6, 10e6, 0.2))
    assert found is not None
    assert found.machines == machines
    assert found.within == pytest.approx(40e6, rel=0.2)
    assert found.between == pytest.approx(10e6, rel=0.2)


@pytest.mark.parametrize(
    "rates",
    [
        rates_of([0] * 8, 20e6, 20e6, 0.3),  # one switch, on which TCP is not quite fair
        rates_of([0, 1], 0, 10e6),
        rates_of([0, 1, 2, 3], 0, 10e6),
        rates_of([0, 0, 1, 2, 3, 4, 5, 6], 30e6, 20e6),  # one pair that is fast by chance
        rates_of([0, 0, 1, 1], 20e6, 0),
        # 0 and 1, and 1 and 2 are near, but 0 and 2 are not: no racks explain this.
        [[0, 40, 10, 10], [40, 0, 40, 10], [10, 40, 0, 10], [10, 10, 10, 0]],
    ],
)
def test_no_racks_are_made_up(rates: Rates) -> None:
    assert find_racks(rates) is None


def test_adding_up_by_rack_pays_where_the_uplink_is_the_limit() -> None:
    # 2 racks of 4 at 100 Mb/s with uplinks of 100 Mb/s, of which 16 pairs have a share: Parameter Hub's inequality.
    slow = find_racks(rates_of([0] * 4 + [1] * 4, 25e6, 100e6 / 16))
    assert slow is not None
    assert slow.pays
    assert slow.port == pytest.approx(100e6)
    assert slow.uplink == pytest.approx(100e6)
    assert slow.flat_s == pytest.approx(16e9 * 4 * 4 / 8 / 100e6)
    assert slow.by_rack_s == pytest.approx(16e9 * 7 / 8 / 100e6)
    # Here the uplinks are a little slower than the ports together.
    fast = find_racks(rates_of([0, 0, 1, 1], 40e6, 31e6))
    assert fast is not None
    assert not fast.pays


@pytest.mark.skipif(bool(missing), reason="shaped links need " + " and ".join(missing))
def test_racks_of_a_testbed_are_measured() -> None:
    with Testbed(4, "40mbit", racks=2, oversubscription=4) as bed, contextlib.ExitStack() as stack:
        secret, port = fresh(), str(free_port())
        addresses = [host.address for host in bed.hosts]
        command = [sys.executable, "-m", "poseidon", "racks", "--seconds", "2", "--json"]
        processes = [
            stack.enter_context(
                bed.exec(
                    host,
                    command,
                    env={
                        **os.environ,
                        VARIABLE: secret,
                        "RANK": str(host),
                        "WORLD_SIZE": "4",
                        "MASTER_ADDR": bed.hosts[0].address,
                        "MASTER_PORT": port,
                    },
                    stdout=subprocess.PIPE,
                )
            )
            for host in range(4)
        ]
        told = [process.communicate(timeout=60)[0] for process in processes]
        assert [process.returncode for process in processes] == [0] * 4
    assert told[1:] == [b""] * 3
    result = json.loads(told[0])
    assert result["machines"] == addresses
    assert result["racks"] == [addresses[:2], addresses[2:]]
    assert result["pays"]
