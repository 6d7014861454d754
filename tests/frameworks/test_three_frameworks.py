"""The same network by three frameworks on 4 workers: as in one process, and with the bytes that were planned."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("poseidon._core")

from three_frameworks import BY_NAME, SHAPES, WORKERS, first_params

SCRIPT = Path(__file__).with_name("three_frameworks.py")
CLI = [sys.executable, "-m", "poseidon", "run"]


def trained(framework: str, workers: int, result: Path) -> list[dict[str, np.ndarray]]:
    """What each rank has written."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3", "POSEIDON_TRANSPORT": "tcp"}
    command = [*CLI, "-n", str(workers), str(SCRIPT), framework, str(result)]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert answer.returncode == 0, answer.stderr
    return [dict(np.load(f"{result}-{rank}.npz")) for rank in range(workers)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """Trained by one process on the whole batches."""
    (alone,) = trained("torch", 1, tmp_path_factory.mktemp("alone") / "result")
    return alone


@pytest.mark.parametrize("framework", BY_NAME)
def test_parameters_are_those_of_one_process(framework: str, reference: dict[str, np.ndarray], tmp_path: Path) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    ranks = trained(framework, WORKERS, tmp_path / "result")
    found = ranks[0]
    for name, first in first_params().items():
        assert found[name].shape == SHAPES[name]
        assert np.abs(found[name] - first).max() > 1e-3, "it has been trained"
        np.testing.assert_allclose(found[name], reference[name], rtol=0, atol=2e-6, err_msg=name)
        assert all((one[name] == found[name]).all() for one in ranks), "all ranks have the same bits"
    assert list(found["schemes"]) == ["ps", "ps", "sfb"], "the large layer goes as factors by all"
    # After the first step all schemes are known. A small layer is whole on one server, so the mean is what is planned.
    moved = np.mean([np.median(one["steps"][1:]) for one in ranks])
    assert moved == pytest.approx(float(found["planned"]), rel=0.05)
