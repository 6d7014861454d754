"""Some pairs and triples of features (feature_pairs.py): each is refused as the table foresees, or trains rightly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

import features
from feature_pairs import GOOD, Pairs, all_jobs, sample, some_triples
from feature_prediction import predicted

SEED = 1
SLICES = 8
JOBS = [*sample(0.1, SEED), *some_triples(24, SEED)]
# Found wrong or late once, or of three features of which each pair is right.
KEPT = (
    ("join", "several models"),
    ("aggregator=median", "machines"),
    ("aggregator=median", "process_group"),
    ("consistency=ssp", "aggregator=median"),
    ("sparse embedding", "own comm hook"),
    ("machines", "transport=shm"),
    ("LocalSGD", "scheme=sfb"),
    ("LocalSGD outer", "assignment=worker"),
    ("set_weight", "own comm hook"),
    ("on_failure=rejoin", "second DistributedOptimizer"),
)


# What is refused by the rules of layers, or as a call that comes twice, or has no such argument.
RULES = ("parameter ", "the gradients of parameter ", "register_comm_hook ", "powerSGD_hook ", "LocalSGD.__init__")


@pytest.fixture(scope="module")
def pairs() -> Iterator[Pairs]:
    found = Pairs()
    yield found
    found.close()


def failures(pairs: Pairs, jobs: Sequence[tuple[str, ...]]) -> list[str]:
    outcomes = {" + ".join(job): pairs.train(job) for job in jobs}
    return [f"{job}: {outcome}" for job, outcome in outcomes.items() if outcome.kind not in GOOD]


@pytest.mark.parametrize("part", range(SLICES))
def test_drawn_jobs_are_refused_as_foreseen_or_train(pairs: Pairs, part: int) -> None:
    assert failures(pairs, JOBS[part::SLICES]) == []


def test_what_was_wrong_once_is_refused_as_foreseen_or_trains(pairs: Pairs) -> None:
    assert failures(pairs, KEPT) == []


def test_the_refusals_of_all_pairs_are_foreseen() -> None:
    """Each feature trains alone, and what is refused is refused for one reason, whoever comes first."""
    found = {job: predicted(settings) for job in all_jobs() if (settings := features.combine(job)) is not None}
    assert [job for job, refusal in found.items() if refusal is not None and len(job) == 1] == []
    refused = [refusal for refusal in found.values() if refusal is not None]
    assert 300 < len(refused) < 400
    texts = Counter(one.text for one in refused if " exclude each other: " not in one.text)
    assert all(text.startswith(RULES) for text in texts), texts
