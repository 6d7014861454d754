"""min_workers: a job begins with some workers and takes in others while it trains, with the bits of its history."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("poseidon._core", reason="the compiled core is not built")

from growth_cases import Event, random_events, repeat, train


@pytest.mark.parametrize(("seed", "kind", "scheme"), [(1, "sgd bufferless", "sfb"), (2, "adam overlap", "ps")])
def test_from_two_to_eight_to_three_workers(tmp_path: Path, seed: int, kind: str, scheme: str) -> None:
    steps = 90
    trained = train(tmp_path / "job", random_events(seed, 2, 8, 3, steps), 2, 8, steps, kind, scheme)
    assert trained.sizes[0] == 2
    assert max(trained.sizes) == 8
    assert trained.sizes[-1] == 3
    assert len(set(trained.digests.values())) == 1
    assert len(trained.digests) == 3
    assert repeat(tmp_path, trained.sizes, kind, scheme) == trained.digests[0]


def test_it_begins_without_those_that_may_come(tmp_path: Path) -> None:
    trained = train(tmp_path / "job", [Event(10, "start", 5)], 1, 6, 40)
    assert trained.sizes[0] == 1
    assert trained.sizes[-1] == 2
    assert len(set(trained.digests.values())) == 1
