#!/usr/bin/env python3
"""Short trainings of many kinds, in each of which processes are killed one after another.

    python bench/kill_storms.py                  # 30 storms, about 15 minutes
    python bench/kill_storms.py --first 7 --storms 1

Each storm is a soak of some seconds (`soak.py`), with a new fault half a second after a recovery, or in its midst. Its
number decides how many workers and servers there are, who updates, whether lost workers come back, whether processes
have children, and whether a launcher has given the run an identity. With rejoin the trained states have the bits of the
same training undisturbed. The exit status is 1 on a hang, on a wrong bit, or if a process ends that was not killed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import replace

from faults.soak_config import SoakConfig
from faults.soak_result import SoakResult
from soak import run_soak

SECONDS, EVERY = 15.0, 0.5
UPDATES = ("sgd", "adam", "overlap", "server")


def storm(number: int, timeout: float) -> SoakConfig:
    """What the storm of this number runs."""
    draw = random.Random(number)
    config = SoakConfig(
        seconds=SECONDS,
        every=EVERY,
        timeout=timeout,
        seed=number,
        ranks=draw.randint(2, 5),
        servers=draw.choice((0, 0, 1, 2)),
        optimizer=draw.choice(UPDATES),
        children=draw.choice((0, 2)),
        faults=draw.choice((("kill",), ("kill", "term"))),
        run=draw.choice(("", f"storm {number}")),
    )
    shrinks = config.optimizer != "server" and config.servers == 0 and draw.random() < 0.4
    return replace(config, on_failure="shrink") if shrinks else config


def words(config: SoakConfig) -> str:
    """What it is, in a line."""
    found = [f"{config.ranks} ranks", f"{config.servers} servers" if config.servers else "", config.on_failure]
    found += [config.optimizer, "children" if config.children else "", "an identity" if config.run else ""]
    return ", ".join(part for part in (*found, "+".join(config.faults)) if part)


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storms", type=int, default=30)
    parser.add_argument("--first", type=int, default=1, help="the number of the first")
    parser.add_argument("--timeout", type=float, default=15.0, help="Poseidon's, in seconds")
    arguments = parser.parse_args()
    began, failed, total = time.monotonic(), 0, SoakResult()
    for number in range(arguments.first, arguments.first + arguments.storms):
        config = storm(number, arguments.timeout)
        result = run_soak(config)
        total.faults += result.faults
        total.compared += result.compared
        failed += bool(result.problems)
        print(f"storm {number} ({words(config)}): {result.faults.total()} faults, {result.steps} steps, ", end="")
        print(f"{result.compared} states compared, {len(result.problems)} problems", flush=True)
        for problem in result.problems:
            print(problem, flush=True)
    seconds = time.monotonic() - began
    print(f"{arguments.storms} storms, {total.faults.total()} faults, {total.compared} states of equal bits, ", end="")
    print(f"{failed} failed, {seconds:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
