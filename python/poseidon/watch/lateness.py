"""Which worker the others wait for, and where in the step it falls behind."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from poseidon.live import WorkerFigures

_LEAST_SHARE = 0.05  # of a step: less is within what steps differ by


@dataclass(frozen=True)
class Lateness:
    """The worker that comes last. `layer`: before whose gradient it loses most; empty: before the first gradient."""

    rank: int
    seconds: float
    layer: str


def latest_worker(workers: Sequence[WorkerFigures]) -> Lateness | None:
    """The worker of one job that is late; None if none is by much, or too little is known.

    No common clock is needed. A layer's result comes to all at about the same time, so whoever waits least for it has
    contributed last.
    """
    common = [layer.name for layer in workers[0].layers] if len(workers) > 1 else []
    times = [{layer.name: layer.seconds for layer in worker.layers} for worker in workers]
    common = [name for name in common if all(name in one for one in times)]
    found: Lateness | None = None
    for worker, own in zip(workers, times, strict=True):
        others = [one for one in times if one is not own]
        late = [statistics.median(one[name] for one in others) - own[name] for name in common]
        if late and (found is None or max(late) > found.seconds):
            found = Lateness(worker.rank, max(late), _where(common, late))
    step_s = statistics.median(worker.step_s for worker in workers) if workers else 0.0
    return found if found is not None and found.seconds > _LEAST_SHARE * step_s else None


def _where(names: Sequence[str], late: Sequence[float]) -> str:
    """Before which gradient the lateness grows most, up to where it is largest."""
    end = late.index(max(late))
    growth = [after - before for before, after in zip((0.0, *late[:end]), late[: end + 1], strict=True)]
    place = growth.index(max(growth))
    return names[place] if place else ""
