"""docs/paper-map.md refers to files, tests and pages that exist, and claims no more than it can show."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "paper-map.md").read_text(encoding="utf-8")
CLAIMS = [" ".join(claim.split()) for claim in re.split(r"^- (?=\*\*§)", TEXT, flags=re.MULTILINE)[1:]]
PLACES = ("src", "include", "python", "tests", "bench", "docs", "tools")
FILES = [
    path.relative_to(ROOT).as_posix()
    for path in chain(*((ROOT / place).rglob("*") for place in PLACES))
    if "__pycache__" not in path.parts
]
IS_PATH = re.compile(r"[\w*./-]+(?:\.(?:cc|h|py|md|def)|/)|tests/[\w/*.]+")


def found(name: str) -> list[str]:
    """The files and folders that a name of the page stands for."""
    pattern = re.compile(r"(?:.*/)?" + re.escape(name.rstrip("/")).replace(r"\*", "[^/]*"))
    return [path for path in FILES if pattern.fullmatch(path)]


@pytest.mark.parametrize("claim", CLAIMS, ids=[claim[:24] for claim in CLAIMS])
def test_all_that_a_claim_names_is_there(claim: str) -> None:
    claim = claim.split(" ## ")[0]
    for name in re.findall(r"`([^`]+)`", claim):
        if IS_PATH.fullmatch(name):
            assert found(name), f"there is no {name}"
    for files, test in re.findall(r"`([\w/.*]+\.(?:cc|py))` \(`(\w+)`\)", claim):
        texts = [(ROOT / path).read_text(encoding="utf-8") for path in found(files)]
        assert any(test in text for text in texts), f"{files} has no {test}"
    for target in re.findall(r"\]\(([^)#]+)", claim):
        assert (ROOT / "docs" / target).exists(), target


@pytest.mark.parametrize("claim", CLAIMS, ids=[claim[:24] for claim in CLAIMS])
def test_a_claim_is_done_only_where_something_shows_it(claim: str) -> None:
    status = re.search(r"Status: (\[?\w+|–|\*\w+)", claim)
    assert status is not None
    assert status[1] in ("done", "built", "[measured", "does", "not", "–"), status[1]
    if status[1] == "done":
        assert re.search(r"(?:Tests?|Benchmark): |Shown in|for racks", claim), "nothing shows it"
