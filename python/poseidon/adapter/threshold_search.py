"""The search for the priority threshold in the first steps of a training (Geryon §III).

Thresholds are tried in turns, so that slow changes of the cluster's speed affect all of them. A parabola is fitted
through the median step times of the thresholds, and the threshold where it is lowest is kept.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from fractions import Fraction

CANDIDATES = tuple(eighth / 8 for eighth in range(8))
"""The thresholds that are tried: from all layers in class 0 to the first eighth of them."""

_ROUNDS = 3
_WARM_UP_STEPS = 2


class ThresholdSearch:
    """One search. `add` takes step times, and `best` and `decide` give a threshold.

    `threshold` is the one to use for the next step. Its step counts are the same on all ranks, whatever they measure.
    """

    def __init__(
        self, candidates: Sequence[float] = CANDIDATES, rounds: int = _ROUNDS, warm_up_steps: int = _WARM_UP_STEPS
    ) -> None:
        self._candidates = candidates
        self._step_count = rounds * len(candidates)
        self._warm_up_left = warm_up_steps
        self.decision: int | None = None  # the candidate's index
        self.durations_ns: list[int] = []

    @property
    def threshold(self) -> float:
        """The threshold for the next step: the one to try and, in the end, the one that was found."""
        index = len(self.durations_ns) % len(self._candidates) if self.decision is None else self.decision
        return self._candidates[index]

    @property
    def complete(self) -> bool:
        """Whether all steps have been measured."""
        return len(self.durations_ns) == self._step_count

    @property
    def finished(self) -> bool:
        """Whether the threshold is final."""
        return self.decision is not None

    @property
    def steps(self) -> int:
        """The number of steps of the whole search."""
        return self._step_count + self._warm_up_left

    def add(self, duration_ns: int) -> None:
        """Adds the time of a step with `threshold`."""
        if self._warm_up_left:
            self._warm_up_left -= 1
        else:
            self.durations_ns.append(duration_ns)

    def best(self, totals_ns: Sequence[int]) -> int:
        """The index of the best candidate, from the sums of all ranks' `durations_ns`."""
        count = len(self._candidates)
        medians = [statistics.median(totals_ns[index::count]) for index in range(count)]
        fitted = _fit(self._candidates, medians)
        return min(range(count), key=fitted.__getitem__)

    def decide(self, index: int) -> None:
        """Ends the search with this candidate."""
        self.decision = index


def _fit(positions: Sequence[float], values: Sequence[float]) -> list[Fraction]:
    """The values of the parabola through (position, value) with the least squared error.

    It is exact. Rounding, which may differ between calls of a linear algebra library, would choose among equal values.
    """
    fitted = [Fraction(0)] * len(positions)
    for vector in _orthogonal_powers(positions):
        share = _dot(map(Fraction, values), vector) / _dot(vector, vector)
        fitted = [value + share * entry for value, entry in zip(fitted, vector, strict=True)]
    return fitted


def _orthogonal_powers(positions: Sequence[float]) -> list[list[Fraction]]:
    """A basis of the polynomials up to the second degree at these positions (Gram-Schmidt)."""
    basis: list[list[Fraction]] = []
    for power in range(3):
        vector = [Fraction(position) ** power for position in positions]
        for other in basis:
            share = _dot(vector, other) / _dot(other, other)
            vector = [entry - share * part for entry, part in zip(vector, other, strict=True)]
        if any(vector):
            basis.append(vector)
    return basis


def _dot(left: Iterable[Fraction], right: Iterable[Fraction]) -> Fraction:
    return sum((one * other for one, other in zip(left, right, strict=True)), Fraction(0))
