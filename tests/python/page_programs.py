"""Programs of documentation pages and examples, run as the pages say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 150


def first_program(page: str) -> str:
    """The first Python program of a page of docs/."""
    return programs(page)[0]


def programs(page: str) -> list[str]:
    """The complete Python programs of a page of docs/, which begin with imports."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    found = re.findall(r"```python\n((?:import|from) .*?)```", text, re.DOTALL)
    assert found, page
    return list(found)


def output_on_two(program: Path) -> str:
    """What `poseidon run -n 2` of a program prints; AssertionError with that if it fails."""
    command = [sys.executable, "-m", "poseidon", "run", "-n", "2", str(program)]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{program} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout
