"""The search for the priority threshold: pure, from step times to a threshold."""

from __future__ import annotations

import random

import pytest

from poseidon.adapter.threshold_search import CANDIDATES, ThresholdSearch


def run(search: ThresholdSearch, duration_ns: object, ranks: int = 1) -> float:
    """Feeds `duration_ns(threshold)` until the search is over."""
    totals: list[int] = []
    while not search.complete:
        threshold = search.threshold
        durations = [duration_ns(threshold) for _ in range(ranks)]  # type: ignore[operator]
        before = len(search.durations_ns)
        search.add(durations[0])
        if len(search.durations_ns) > before:
            totals.append(sum(durations))
    search.decide(search.best(totals))
    assert search.finished
    return search.threshold


@pytest.mark.parametrize("best", [0.0, 0.25, 0.5, 0.875])
def test_a_smooth_curve_gives_its_lowest_point(best: float) -> None:
    found = run(ThresholdSearch(), lambda threshold: int(1e9 * (1 + (threshold - best) ** 2)))
    assert found == best


@pytest.mark.parametrize("seed", range(8))
def test_noise_and_outliers_do_not_mislead(seed: int) -> None:
    """Noise of 2 %, one step in ten twice as long, a drift of 20 %: near the best of a curve that varies by 30 %."""
    noise = random.Random(seed)
    steps = [0]

    def duration(threshold: float) -> int:
        steps[0] += 1
        seconds = (1 + 0.6 * (threshold - 0.5) ** 2 * 2) * (1 + 0.2 * steps[0] / 30) * noise.gauss(1, 0.02)
        return int(1e9 * seconds * (2 if noise.random() < 0.1 else 1))

    assert abs(run(ThresholdSearch(rounds=5), duration, ranks=4) - 0.5) <= 0.25


def test_candidates_take_turns() -> None:
    search = ThresholdSearch(candidates=(0.2, 0.4, 0.6), rounds=2, warm_up_steps=1)
    tried = []
    for step in range(search.steps):
        tried.append(search.threshold)
        search.add(step)
    assert tried == [0.2, 0.2, 0.4, 0.6, 0.2, 0.4, 0.6]
    assert search.durations_ns == [1, 2, 3, 4, 5, 6]
    assert search.complete
    assert not search.finished
    search.decide(1)
    assert search.threshold == 0.4


def test_the_first_steps_do_not_count() -> None:
    search = ThresholdSearch(warm_up_steps=2)
    found = run(search, lambda threshold: int(1e9 * (1 + threshold)) if search.durations_ns else int(1e12))
    assert found == CANDIDATES[0]


def test_equal_times_give_the_same_answer_everywhere() -> None:
    for candidates in (CANDIDATES, CANDIDATES[:2], CANDIDATES[:1]):
        answers = {run(ThresholdSearch(candidates), lambda _: 10**9) for _ in range(20)}
        assert answers == {0.0}
