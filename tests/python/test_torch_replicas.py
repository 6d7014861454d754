"""Replicas of sharded models, each in a world of its own, of which some are lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from recovery_cases import Fault
from replica_cases import Replicas, killed, train

STEPS = 6


def _outcome(folder: Path, kind: str, faults: list[Fault], count: int = 2, shards: int = 2, **environment: str) -> list:
    folder.mkdir()
    replicas = Replicas(folder, count, shards, environment={"POSEIDON_ON_FAILURE": "rejoin", **environment})
    answers = replicas.run(train, kind, STEPS, faults)
    assert replicas.restarted == len(faults)
    return answers


def _bits(answers: list) -> list:
    """By shard; the replicas have the same."""
    found = [[(one["parameters"], one["state"]) for one in replica] for replica in answers]
    assert all(replica == found[0] for replica in found)
    return found[0]


@pytest.mark.parametrize("kind", ["sgd", "adam overlap"])
def test_a_lost_replica_is_replaced(tmp_path: Path, kind: str) -> None:
    undisturbed = _bits(_outcome(tmp_path / "undisturbed", kind, []))
    disturbed = _outcome(tmp_path / "disturbed", kind, [killed(1, 0, 3, "backward")])
    assert _bits(disturbed) == undisturbed
    assert disturbed[0][0]["history"][0][2] == [1]
