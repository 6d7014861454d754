"""What came of a soak: states, recoveries and problems; how they are compared and told."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from faults.job import Event
from faults.soak_config import ENDING, SoakConfig


@dataclass
class Recovered:
    """One incident that is over."""

    seconds: float
    kinds: list[str]


@dataclass
class SoakResult:
    """What came of it. digests: of the state at the beginning of steps."""

    faults: Counter[str] = field(default_factory=Counter)
    recovered: list[Recovered] = field(default_factory=list)
    steps: int = 0
    digests: dict[int, str] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    compared: int = 0  # digests that were compared with the undisturbed run's
    problems: list[str] = field(default_factory=list)
    memory: dict[tuple[int, int], list[tuple[float, int]]] = field(default_factory=dict)
    """By slot and process: when, and bytes in use."""
    choices: list[dict[str, Any]] | None = None  # the log of schemes, in the end the same on all workers
    _by_generation: dict[tuple[int, int], str] = field(default_factory=dict)

    def note_digest(self, event: Event, on_failure: str) -> None:
        """All workers must have the same state at a step: in a generation, with rejoin whenever they do it."""
        step, value = event.data["step"], event.data["value"]
        generation = event.data["generation"] if on_failure == "shrink" else 0  # others make a step again
        if self._by_generation.setdefault((step, generation), value) != value:
            self.problems.append(f"wrong bit: slot {event.slot} has another state than others at step {step}")
        self.digests.setdefault(step, value)
        self.memory.setdefault((event.slot, event.pid), []).append((event.at, event.data["memory_bytes"]))

    def growth_per_hour(self) -> float | None:
        """Bytes by which the process that lived longest has grown, without its first quarter. None: too short."""
        seen = max(self.memory.values(), key=lambda times: times[-1][0] - times[0][0], default=[])
        seen = seen[len(seen) // 4 :]
        if len(seen) < 2:
            return None
        (begin, before), (end, after) = seen[0], seen[-1]
        return (after - before) / (end - begin) * 3600

    def note_choices(self, event: Event) -> None:
        """Logs are made by rank 0 and must have survived whatever happened to it."""
        log = event.data["log"]
        if self.choices is not None and log != self.choices:
            self.problems.append(f"slot {event.slot} has another log of schemes than others: {log}, {self.choices}")
        self.choices = log

    def compare(self, undisturbed: SoakResult) -> None:
        """With the same training without faults, which takes the same schemes at the same steps."""
        common = sorted(self.digests.keys() & undisturbed.digests.keys())
        self.compared = len(common)
        wrong = [step for step in common if self.digests[step] != undisturbed.digests[step]]
        if wrong:
            self.problems.append(f"wrong bit: the state differs from the undisturbed run's from step {wrong[0]} on")
        if not common:
            self.problems.append("nothing could be compared with the undisturbed run")


def spread(recovered: Sequence[Recovered]) -> dict[str, float]:
    """How long recoveries took, in seconds."""
    seconds = sorted(one.seconds for one in recovered)
    if not seconds:
        return {"count": 0}
    slow = seconds[min(len(seconds) - 1, math.ceil(0.95 * len(seconds)) - 1)]
    return {"count": len(seconds), "median": median(seconds), "95%": slow, "max": seconds[-1]}


def document(config: SoakConfig, result: SoakResult) -> dict[str, object]:
    """The result for machines."""
    ended = [one for one in result.recovered if set(one.kinds) <= ENDING]
    frozen = [one for one in result.recovered if not set(one.kinds) <= ENDING]
    return {
        "ranks": config.ranks,
        "servers": config.servers,
        "on_failure": config.on_failure,
        "optimizer": config.optimizer,
        "seed": config.seed,
        "timeout": config.timeout,
        "steps": result.steps,
        "faults": dict(result.faults),
        "recoveries_from_ended": spread(ended),
        "recoveries_from_frozen": spread(frozen),
        "memory_growth_bytes_per_hour": result.growth_per_hour(),
        "digests": len(result.digests),
        "compared": result.compared,
        "schemes_changed": len(result.choices or ()),
        "first_loss": result.losses[0] if result.losses else None,
        "last_loss": result.losses[-1] if result.losses else None,
        "problems": result.problems,
    }


def print_result(config: SoakConfig, result: SoakResult) -> None:
    """The result for people."""
    facts = document(config, result)
    faults = ", ".join(f"{count} {kind}" for kind, count in sorted(result.faults.items()))
    servers = f", {config.servers} servers" if config.servers else ""
    what = f"{config.ranks} ranks{servers}, {config.on_failure}, {config.optimizer}, seed {config.seed}"
    print(f"{what}: {result.steps} steps")
    print(f"faults: {result.faults.total()} ({faults})")
    for title, key in (
        ("processes that ended", "recoveries_from_ended"),
        ("frozen ones, too", "recoveries_from_frozen"),
    ):
        times = facts[key]
        assert isinstance(times, dict)
        text = ", ".join(f"{name} {value:.2f} s" for name, value in times.items() if name != "count")
        print(f"recoveries, {title}: {times['count']} {text}")
    print(f"states compared with the undisturbed run: {result.compared} of {len(result.digests)}")
    if (growth := result.growth_per_hour()) is not None:
        print(f"memory of the process that lived longest: {growth / 2**20:+.1f} MiB an hour")
    for problem in result.problems:
        print(f"PROBLEM: {problem}")
    print("no hang, no wrong bit" if not result.problems else f"{len(result.problems)} problems")
