"""Decides which units change their scheme: when steps are predicted to become faster by more than they vary.

A change is a trial. If the steps after it are not faster than those before it, it is taken back, and not made again
until the cluster has changed. Pure: the same measurements give the same decisions. Only rank 0 decides.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from poseidon.adapter.choice.measurement import noise_s
from poseidon.adapter.choice.prediction import StepModel

_LARGEST = 16  # units that are tried, those with the largest demands: others cannot change a step by 2 %
_ANOTHER_CLUSTER = 1.25  # a rate that differs by this factor
_LEAST_SHARE = 0.3  # of the predicted gain, without which a change is taken back


@dataclass(frozen=True)
class Decision:
    """New schemes, from the next step on. Times are seconds per step."""

    schemes: dict[str, str]  # by the name of the layer
    taken_back: bool  # because the steps have not become faster
    measured_s: float  # with the schemes until now
    predicted_s: float  # with the new ones
    link_bytes_per_s: float


def best_schemes(model: StepModel) -> tuple[str, ...]:
    """The schemes of all units with which the predicted step is the fastest.

    It begins with the present schemes, and with each scheme for every unit that may take it. It then changes one unit
    after another, as long as that helps. Of equal predictions the one with fewer changes wins.
    """
    tried = _largest(model)
    starts = [model.schemes]
    for scheme in dict.fromkeys(scheme for index in tried for scheme in model.units[index].demands):
        start = [
            scheme if index in tried and scheme in unit.demands else unit.scheme
            for index, unit in enumerate(model.units)
        ]
        starts.append(tuple(start))
    found = [_descend(model, start, tried) for start in starts]
    return min(found, key=lambda schemes: (model.predict(schemes).seconds, _changes(model, schemes)))


def _changes(model: StepModel, schemes: Sequence[str]) -> int:
    return sum(new != old for new, old in zip(schemes, model.schemes, strict=True))


def _largest(model: StepModel) -> list[int]:
    """The units that have a choice and the most to gain by it, the largest first."""

    def seconds(index: int) -> float:
        rates = model.rates
        return max(
            demand.carried_bytes / rates.link_bytes_per_s + demand.multiply_adds / rates.multiply_adds_per_s
            for demand in model.units[index].demands.values()
        )

    open_units = [index for index, unit in enumerate(model.units) if len(unit.demands) > 1]
    return sorted(open_units, key=seconds, reverse=True)[:_LARGEST]


def _descend(model: StepModel, start: tuple[str, ...], tried: Sequence[int]) -> tuple[str, ...]:
    best, least = start, model.predict(start).seconds
    improved = True
    while improved:
        improved = False
        for index in tried:
            for scheme in model.units[index].demands:
                other = (*best[:index], scheme, *best[index + 1 :])
                seconds = model.predict(other).seconds
                if seconds < least:
                    best, least, improved = other, seconds, True
    return best


@dataclass(frozen=True)
class _Refusal:
    """A change that has been taken back, and the state of the cluster that it was made in."""

    schemes: dict[str, str]
    link_bytes_per_s: float
    measured_s: float


@dataclass(frozen=True)
class _Trial:
    """A change that steps have yet to confirm."""

    before: dict[str, str]  # the schemes that it has replaced
    gain_s: float  # predicted
    noise_s: float
    refusal: _Refusal  # what it becomes if it is taken back


class Decider:
    """Takes measurements of steps between two changes and decides on the next change."""

    def __init__(self) -> None:
        self._trial: _Trial | None = None
        self._refused: list[_Refusal] = []

    def consider(self, model: StepModel, durations_s: Sequence[float]) -> Decision | None:
        """Takes the durations of the steps since the last change. Returns the next change, or None."""
        measured_s, link = statistics.median(durations_s), model.rates.link_bytes_per_s
        trial, self._trial = self._trial, None
        if trial is not None:
            wanted_s = max(_LEAST_SHARE * trial.gain_s, min(trial.noise_s, trial.gain_s / 2))
            if trial.refusal.measured_s - measured_s < wanted_s:
                self._refused.append(trial.refusal)
                return Decision(trial.before, True, measured_s, trial.refusal.measured_s, link)
        self._refused = [
            refusal
            for refusal in self._refused
            if _same(refusal.link_bytes_per_s, link) and _same(refusal.measured_s, measured_s)
        ]
        return self._improve(model, measured_s, noise_s(durations_s))

    def _improve(self, model: StepModel, measured_s: float, noise: float) -> Decision | None:
        best = best_schemes(model)
        present_s, predicted_s = model.predict(model.schemes).seconds, model.predict(best).seconds
        gain_s = present_s - predicted_s
        changed = [(unit, scheme) for unit, scheme in zip(model.units, best, strict=True) if scheme != unit.scheme]
        schemes = {unit.names[0]: scheme for unit, scheme in changed}
        if gain_s <= noise or any(refusal.schemes == schemes for refusal in self._refused):
            return None
        before = {unit.names[0]: unit.scheme for unit, _ in changed}
        link = model.rates.link_bytes_per_s
        self._trial = _Trial(before, gain_s, noise, _Refusal(schemes, link, measured_s))
        return Decision(schemes, False, measured_s, max(0.0, measured_s - gain_s), link)


def _same(one: float, other: float) -> bool:
    return one < other * _ANOTHER_CLUSTER and other < one * _ANOTHER_CLUSTER
