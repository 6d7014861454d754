"""Many steps of workers of different speeds: what waiting for slow ones costs, and what not waiting does.

A step's compute and its exchange are those of one simulated step (`predict.py`). When a server ends a step without late
workers is decided by the servers' own code (`_core.DropRule`).
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from statistics import fmean
from typing import Any

from poseidon import _core
from poseidon.adapter.features import Features
from poseidon.errors import InvalidArgument

_NS = 1e9
_MOST_STEPS = 100_000


@dataclass(frozen=True)
class Pace:
    """How fast workers are, and whom a step waits for. The last worker is slow: it takes `slow` times as long.

    It does so in the part `slow_share` of its steps, at equal distances. `jitter` is the standard deviation of every
    worker's steps over their mean, drawn at random by `seed`. `stragglers`, `straggler_factor`,
    `straggler_steps`, `consistency` and `staleness` are Poseidon's options. `catches_up`: the slow worker leaves out
    steps that ended without it (`missed_steps()`). Raises InvalidArgument for what cannot be.
    """

    slow: float = 1.0
    slow_share: float = 1.0
    jitter: float = 0.0
    stragglers: str = "wait"
    straggler_factor: float = 3.0
    straggler_steps: int = 8
    catches_up: bool = False
    consistency: str = "bsp"
    staleness: int = 3
    steps: int = 300
    seed: int = 0

    def __post_init__(self) -> None:
        problems = [
            (not 1 <= self.slow < float("inf"), f"slow is {self.slow:g}: it must be 1 or more"),
            (not 0 <= self.slow_share <= 1, f"slow-share is {self.slow_share:g}: it must be from 0 to 1"),
            (not 0 <= self.jitter <= 1, f"jitter is {self.jitter:g}: it must be from 0 to 1"),
            (self.stragglers not in ("wait", "drop"), f"stragglers is {self.stragglers}: give wait or drop"),
            (self.consistency not in ("bsp", "ssp", "async"), f"consistency is {self.consistency}: bsp, ssp or async"),
            (self.straggler_steps < 1, f"straggler-steps is {self.straggler_steps}: it must be 1 or more"),
            (self.staleness < 0, f"staleness is {self.staleness}: it must be 0 or more"),
            (not 1 <= self.steps <= _MOST_STEPS, f"steps is {self.steps}: give 1 to {_MOST_STEPS}"),
            (self.catches_up and self.stragglers != "drop", "catching up is for stragglers=drop"),
        ]
        for wrong, words in problems:
            if wrong:
                raise InvalidArgument(words)
        Features(*_core.features_of(_core.Options(stragglers=self.stragglers, consistency=self.consistency)))

    @property
    def waits_for_all(self) -> bool:
        """Whether every step waits for all workers."""
        return self.stragglers == "wait" and self.consistency == "bsp"


@dataclass(frozen=True)
class PaceResult:
    """What many steps came to.

    `step_s`: of the workers that are not slow. `all_done_s`: until the slow one has made its last step, too, per step.
    `counted`: the part of the steps in which the slow worker's gradient is, and so the weight of its examples over that
    of a mean over all. `others_weight`: the same of the other workers' examples, because a mean without the slow worker
    divides by one fewer. `computed`: the part of the steps for which the slow worker has computed a batch. `age`: how
    many steps of all others were applied between a worker's parameters and its gradient, the mean and the most.
    """

    step_s: float
    all_done_s: float
    counted: float
    others_weight: float
    computed: float
    age: tuple[float, float]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {**vars(self), "age": list(self.age)}


def simulate_pace(pace: Pace, workers: int, compute_s: float, exchange_s: float) -> PaceResult:
    """Simulates steps. `exchange_s`: how much longer a step is than its compute if all are equally fast.

    Raises InvalidArgument if the pace needs more workers.
    """
    if workers < 2:
        raise InvalidArgument("one worker waits for nobody: give 2 hosts or more to simulate slow ones")
    found = _Steps(pace, workers, compute_s, exchange_s)
    for step in range(pace.steps):
        found.make(step)
    return found.result()


def time_lost(mtbf_h: float, workers: int, step_s: float, rejoin_s: float) -> tuple[float, float]:
    """Hours from one failure of some worker to the next, and the part of the time that failures take.

    `mtbf_h`: mean hours between failures of one worker. A failure costs `rejoin_s`, in which the worker is started
    again and all meet, and the step that was under way (docs/recovery.md). Raises InvalidArgument for an `mtbf_h` or a
    `rejoin_s` that cannot be.
    """
    if not 0 < mtbf_h < math.inf or not 0 <= rejoin_s < math.inf:
        raise InvalidArgument(f"mtbf is {mtbf_h:g} hours and rejoin {rejoin_s:g} seconds: they must be above 0")
    every_h = mtbf_h / workers
    lost_s = rejoin_s + step_s / 2
    return every_h, lost_s / (every_h * 3600 + lost_s)


class _Steps:
    """Steps, one after the other. Times are in ns. An exchange is a push and a result, which take equally long.

    Beside others a worker's port also carries what its own shard exchanges with them. That is as much again, so a
    worker that exchanges alone takes half of the time.
    """

    def __init__(self, pace: Pace, workers: int, compute_s: float, exchange_s: float) -> None:
        self._pace, self._workers = pace, workers
        self._compute_ns, self._exchange_ns = compute_s * _NS, exchange_s * _NS
        self._random = Random(pace.seed)
        self._begin = [0.0] * workers  # when each worker may begin its next step
        self._arrived: list[list[float]] = []  # by step, and by rank
        self._rule = _core.DropRule(workers, pace.straggler_factor)
        self._missed = self._computed = 0  # steps without the slow worker's gradient, and those it has computed
        self._pushes: list[list[tuple[float, float]]] = [[] for _ in range(workers)]  # applied, and answered

    def make(self, step: int) -> None:
        """One step of all workers."""
        share = self._pace.slow_share
        is_slow = math.floor((step + 1) * share) > math.floor(step * share)
        arrivals = [self._arrival(rank, is_slow and rank == self._workers - 1) for rank in range(self._workers)]
        if self._pace.consistency != "bsp":
            self._push_each(step, arrivals)
            return
        self._computed += 1
        end = max(arrivals) if self._pace.waits_for_all else self._end_dropping(step, arrivals)
        self._arrived.append(arrivals)
        self._missed += arrivals[-1] > end
        self._begin = [max(arrived, end) + self._half_ns(rank) for rank, arrived in enumerate(arrivals)]

    def _arrival(self, rank: int, slow: bool) -> float:
        times = (self._pace.slow if slow else 1.0) + self._pace.jitter * max(-1.0, self._random.gauss(0.0, 1.0))
        return self._begin[rank] + self._compute_ns * max(0.0, times) + self._half_ns(rank)

    def _half_ns(self, rank: int) -> float:
        """A push or a result: alone where nothing is waited for, or behind all others."""
        alone = self._pace.consistency != "bsp" or self._begin[rank] > max(self._begin[:-1]) + self._exchange_ns
        return self._exchange_ns / (4 if alone else 2)

    def _end_dropping(self, step: int, arrivals: list[float]) -> float:
        """When a step ends that may drop the slow worker. One that catches up computes nothing for steps before it."""
        waits_until = self._all_arrived(step - self._pace.straggler_steps)
        end = float(self._rule.end_step([round(time) for time in arrivals], round(waits_until)))
        if self._pace.catches_up and self._begin[-1] >= end:
            self._computed -= 1
            arrivals[-1] = self._begin[-1] + self._half_ns(self._workers - 1)
        return end

    def _all_arrived(self, step: int) -> float:
        """When all workers' contributions to an earlier step were there; 0 for one before the first."""
        return max(self._arrived[step]) if step >= 0 else 0.0

    def _push_each(self, step: int, arrivals: list[float]) -> None:
        """Servers apply every push as it comes. With ssp the answer waits for the slowest worker's earlier step."""
        self._computed += 1
        self._arrived.append(arrivals)
        waits_until = self._all_arrived(step - self._pace.staleness) if self._pace.consistency == "ssp" else 0.0
        for rank, arrived in enumerate(arrivals):
            answered = max(arrived, waits_until)
            self._pushes[rank].append((arrived, answered))
            self._begin[rank] = answered + self._half_ns(rank)

    def result(self) -> PaceResult:
        """What all of them came to."""
        steps, others = self._pace.steps, self._workers - 1
        missed = self._missed / steps
        return PaceResult(
            max(self._begin[:others]) / steps / _NS,
            max(self._begin) / steps / _NS,
            1 - missed,
            1 + missed / others,
            self._computed / steps,
            self._age(),
        )

    def _age(self) -> tuple[float, float]:
        """Steps of all other workers that were applied while a worker computed its gradient."""
        ages = []
        for rank, own in enumerate(self._pushes):
            others = sorted(at for other, all_of in enumerate(self._pushes) if other != rank for at, _ in all_of)
            for (_, answered), (applied, _) in pairwise(own):
                count = bisect.bisect_left(others, applied) - bisect.bisect_right(others, answered)
                ages.append(count / (self._workers - 1))
        return (fmean(ages), max(ages)) if ages else (0.0, 0.0)
