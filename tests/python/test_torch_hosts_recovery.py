"""Jobs whose workers add up by machine and by rack, and that lose some of them: the bits stay those without a loss."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from recovery_cases import Fault, Supervisor, train
from torch_cases import all_equal

STEPS = 5
DIES = 0.0005  # seconds after the backward pass has begun


def train_placed(folder: Path, machines: str, racks: str, kind: str, faults: list[Fault]) -> dict[str, Any]:
    """`machines` and `racks`: by rank, the label of each."""
    rank = int(os.environ["RANK"])
    os.environ["POSEIDON_MACHINE"] = machines[rank]
    if racks:
        os.environ["POSEIDON_RACK"] = racks[rank]
    return train(folder, kind, STEPS, faults)


def digests(folder: Path, restarts: int, *place: Any) -> list[str]:
    folder.mkdir()
    checkpoints = {"POSEIDON_CHECKPOINT_DIR": str(folder / "checkpoints"), "POSEIDON_CHECKPOINT_EVERY": "1"}
    supervisor = Supervisor(folder, len(place[0]), POSEIDON_CHUNK_BYTES="4096", **checkpoints)
    answers = supervisor.run(train_placed, *place)
    assert supervisor.restarted == restarts
    return [answer["digest"] for answer in answers]


@pytest.mark.parametrize(
    ("machines", "racks", "kind", "faults"),
    [
        pytest.param("aabb", "xxyy", "sgd", [Fault(0, 2, "exchange", DIES)], id="the leader of a machine and rack"),
        pytest.param("abcd", "xxyy", "sgd server", [Fault(2, 3, "before step")], id="a worker with a rack's server"),
        pytest.param(
            "aabb", "xxyy", "sgd overlap", [Fault(2, 2, "exchange", DIES), Fault(3, 2, "exchange")], id="a whole rack"
        ),
        pytest.param("aab", "", "adam", [Fault(1, 3, "backward", 1.0, stalls=True)], id="a worker that stalls first"),
    ],
)
def test_the_bits_are_those_without_a_loss(
    tmp_path: Path, machines: str, racks: str, kind: str, faults: list[Fault]
) -> None:
    place = machines, racks, kind
    whole = digests(tmp_path / "whole", 0, *place, [])
    assert all_equal(whole)
    assert digests(tmp_path / "lost", len(faults), *place, faults) == whole
