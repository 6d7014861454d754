"""A simulated day of spot machines: what share of what the machines that were ready could have done is done?

Machines live exponentially long, 2 hours in the mean, and are replaced after 3 to 10 minutes. Once an hour half of
those present are taken at once. The first machine, where all meet, stays. Beside `on_failure=shrink` with
`min_workers` there is a launcher that starts all workers again from a checkpoint at every change, as torchrun does.

Times of Poseidon are measured: a join by `python bench/growth.py`, a start by `python bench/cluster_runs.py`. A loss
takes the patience with a machine that does not answer (docs/decisions/0031-heartbeats.md) and the window in which the
others meet (docs/decisions/0016-generations.md), with the default `timeout`. Of the other launcher the rendezvous waits
for the time that torchrun waits by default for more machines, and its workers start as Poseidon's do.

    python bench/spot_day.py
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

_DAY_S, _HOUR_S = 24 * 3600.0, 3600.0


@dataclass(frozen=True)
class Times:
    """In seconds. `step`: of training, which is made again after a loss. `start`: from a ready machine to its join."""

    step: float
    start: float
    join: float = 0.36
    patience: float = 5.0
    window: float = 5.0
    rendezvous: float = 30.0  # torchrun's last_call_timeout
    save: float = 5.0  # a checkpoint
    load: float = 5.0


@dataclass(frozen=True)
class Change:
    """At a time: machines that become ready, and machines that are lost."""

    at: float
    ready: int = 0
    lost: int = 0


def changes(draw: random.Random, machines: int) -> Iterator[Change]:
    """Of a day, in order. All machines but the first come and go; before the first change all are ready."""
    ends = sorted(draw.expovariate(1 / (2 * _HOUR_S)) for _ in range(machines - 1))
    returns: list[float] = []
    next_event = draw.uniform(0, _HOUR_S)
    while True:
        at = min([*ends[:1], *returns[:1], next_event])
        if at >= _DAY_S:
            return
        if at == next_event:
            taken = set(draw.sample(range(len(ends)), len(ends) // 2))
            lost, ends = len(taken), [end for index, end in enumerate(ends) if index not in taken]
            next_event += _HOUR_S
            yield Change(at, lost=lost)
        elif returns and at == returns[0]:
            returns.pop(0)
            ends = sorted([*ends, at + draw.expovariate(1 / (2 * _HOUR_S))])
            yield Change(at, ready=1)
            continue
        else:
            ends.pop(0)
            lost = 1
            yield Change(at, lost=1)
        returns = sorted([*returns, *(at + draw.uniform(180, 600) for _ in range(lost))])


def ready_seconds(day: list[Change], machines: int) -> float:
    """What the machines that were ready could have done, in machine seconds."""
    total, before, ready = 0.0, 0.0, machines
    for change in [*day, Change(_DAY_S)]:
        total += ready * (change.at - before)
        before, ready = change.at, ready + change.ready - change.lost
    return total


def with_growth(day: list[Change], machines: int, times: Times) -> float:
    """The machine seconds that count with Poseidon. A machine that is lost while it starts counts as one that came."""
    events = sorted(
        [(change.at, -change.lost) for change in day if change.lost]
        + [(change.at + times.start, change.ready) for change in day if change.ready]
    )
    work, now, working = 0.0, 0.0, machines
    for at, count in [*events, (_DAY_S, 0)]:
        work += working * max(0.0, min(at, _DAY_S) - now)
        now = max(now, at)
        if count < 0:
            now += times.patience + times.window
            work -= times.step * (working + count)  # the step under way
        elif count:
            now += times.join
        working += count
    return work


def with_restarts(day: list[Change], machines: int, times: Times, every: float) -> float:
    """The same with a start from a checkpoint at every change. `every`: seconds between checkpoints."""
    work, now, working = 0.0, 0.0, machines
    for change in [*day, Change(_DAY_S)]:
        trained = max(0.0, change.at - now)
        saves = trained // (every + times.save)
        work += working * saves * every if change.at < _DAY_S else working * (trained - saves * times.save)
        now = change.at + times.rendezvous + times.start + times.load
        working += change.ready - change.lost
    return work


def _told(name: str, shares: list[float]) -> None:
    print(f"{name:52} {statistics.median(shares):.3f}  ({min(shares):.3f} to {max(shares):.3f})")


def main() -> None:
    """Prints the median and the range of the shares over many days."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=16)
    parser.add_argument("--days", type=int, default=100)
    parser.add_argument("--step", type=float, default=1.0, help="seconds")
    parser.add_argument("--start", type=float, default=15.0, help="seconds from a ready machine to its join")
    given = parser.parse_args()
    times = Times(given.step, given.start)
    days = [list(changes(random.Random(seed), given.machines)) for seed in range(given.days)]
    could = [ready_seconds(day, given.machines) for day in days]

    def shares(done: Callable[[list[Change]], float]) -> list[float]:
        return [done(day) / whole for day, whole in zip(days, could, strict=True)]

    print(f"{given.machines} machines, {given.days} days, {statistics.mean(map(len, days)):.0f} changes in a day")
    _told("on_failure=shrink", shares(lambda day: with_growth(day, given.machines, times)))
    for minutes in (1, 2, 5, 15):
        done = partial(with_restarts, machines=given.machines, times=times, every=60.0 * minutes)
        _told(f"restarts, a checkpoint every {minutes} min", shares(done))


if __name__ == "__main__":
    main()
