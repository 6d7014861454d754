"""The framework-free adapter, by a little framework of NumPy arrays (`numpy_training.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import numpy_training
import workers
from poseidon.launch import free_port
from poseidon.notices import tell_notices

pytest.importorskip("poseidon._core", reason="the compiled core is not built")
WORLD_SIZE = 2


def trained(steps: int, scheme: str, snapshots: Path) -> list[dict[str, Any]]:
    """Each rank's answer."""
    port = free_port()
    command = [sys.executable, numpy_training.__file__, str(steps), str(snapshots)]
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, **workers.job_variables(rank, WORLD_SIZE, port), "POSEIDON_SCHEME": scheme},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD_SIZE)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * WORLD_SIZE
    return [json.loads(output) for output in outputs]


def expected(steps: int) -> list[Any]:
    """What one process makes of the mean gradients."""
    weight, bias = np.zeros((6, 4)), np.zeros(4)
    for step in range(steps):
        slopes = []
        for rank in range(WORLD_SIZE):
            inputs, targets = numpy_training.batch(step, rank)
            error = 2 * (inputs @ weight + bias - targets) / len(inputs)
            slopes.append((inputs.T @ error, error.sum(0)))
        weight -= numpy_training.RATE * sum(one for one, _ in slopes) / WORLD_SIZE
        bias -= numpy_training.RATE * sum(one for _, one in slopes) / WORLD_SIZE
    return [bias, weight]


@pytest.mark.parametrize("scheme", ["ps", "sfb"])
def test_a_framework_without_pytorch_trains_and_goes_on_from_a_snapshot(scheme: str, tmp_path: Path) -> None:
    first = trained(4, scheme, tmp_path)
    second = trained(7, scheme, tmp_path)
    for answers, began, steps in ((first, 0, 4), (second, 4, 7)):
        for answer in answers:
            assert answer["began"] == began
            assert answer["schemes"] == ["ps", scheme]
            assert answer["plan"] == ["bias", "weight"]
            assert not answer["torch"]
            for value, wanted in zip(answer["values"], expected(steps), strict=True):
                np.testing.assert_allclose(value, wanted, rtol=1e-12)
        assert answers[0]["values"] == answers[1]["values"]


def test_notices_are_printed_where_warnings_are_errors(capsys: pytest.CaptureFixture[str]) -> None:
    client = cast(Any, SimpleNamespace(fresh_notices=lambda: ["rank 1 is silent", "rank 1 is heard again"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tell_notices(client)
    assert capsys.readouterr().err == "poseidon: rank 1 is silent\nposeidon: rank 1 is heard again\n"
    with pytest.warns(UserWarning, match="rank 1 is") as told:
        tell_notices(client)
    assert [str(one.message) for one in told] == ["rank 1 is silent", "rank 1 is heard again"]
