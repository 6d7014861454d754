"""What a launcher sets, in this process."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from poseidon.options.table import PLACE


def remove(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing says the place of this process in a job."""
    for option in PLACE:
        monkeypatch.delenv(option.variable, raising=False)


def given(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str]) -> None:
    """These say it, too."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
