"""Runs jobs of TensorFlow whose ranks are processes that answer some cases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import workers
from poseidon.launch import free_port
from waiting import end

CASES = workers.__file__.replace("workers.py", "tensorflow_cases.py")
TIMEOUT_S = 170


def answers(world_size: int, *cases: str, script: str = CASES, **environment: str) -> list[dict[str, Any]]:
    """Each rank's answers to these cases."""
    port, second = free_port(), free_port()
    common = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1", "SECOND_PORT": str(second)}
    processes = [
        subprocess.Popen(
            [sys.executable, script, *cases],
            env={**common, **workers.job_variables(rank, world_size, port), **environment},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        end(*processes)
    assert [process.returncode for process in processes] == [0] * world_size
    return [json.loads(output.splitlines()[-1]) for output in outputs]
