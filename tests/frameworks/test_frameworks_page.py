"""The page docs/frameworks.md: each of its scripts runs on two ranks, which have the same weights in the end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from runs import POSEIDON_RUN, printed_by, skip_without

PAGE = Path(__file__).resolve().parents[2] / "docs" / "frameworks.md"
SCRIPTS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
PACKAGES = ["lightning", "accelerate", "transformers", "transformers"]


def test_all_scripts_are_run() -> None:
    assert len(SCRIPTS) == len(PACKAGES)


@pytest.mark.parametrize("number", range(len(PACKAGES)))
def test_a_script_runs(tmp_path: Path, number: int) -> None:
    skip_without(PACKAGES[number])
    script = tmp_path / "script.py"
    script.write_text(SCRIPTS[number], encoding="utf-8")
    printed = printed_by([*POSEIDON_RUN, str(script)], tmp_path)
    weights = dict(re.findall(r"rank (\d) of 2: weights (\d+\.\d+)", printed))
    assert set(weights) == {"0", "1"}
    assert weights["0"] == weights["1"]
