"""The version is written in three places, because each is read without the others, and its changes in a fourth."""

from __future__ import annotations

import re
from pathlib import Path

from poseidon.version import VERSION

ROOT = Path(__file__).parents[2]


def test_all_places_say_the_same_version() -> None:
    project = re.search(r'(?m)^version = "(.*)"$', (ROOT / "pyproject.toml").read_text("utf-8"))
    core = re.search(r'kVersionText = "(.*)"', (ROOT / "src" / "base" / "version.h").read_text("utf-8"))
    assert project is not None
    assert core is not None
    assert project[1] == core[1] == VERSION
    newest = re.search(r"(?m)^## (\S+)$", (ROOT / "CHANGELOG.md").read_text("utf-8"))
    assert newest is not None
    assert newest[1] in (VERSION, "Unreleased")
