"""A figure of a paper beside what follows from the models here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """What a table or a sentence of a paper says (`paper`), and `ours`, both in `unit`.

    `given`: the paper's value went into ours, so that they agree by construction.
    """

    section: str
    what: str
    unit: str
    paper: float
    ours: float
    given: bool = False

    @property
    def difference(self) -> float:
        """By which fraction ours is larger."""
        return self.ours / self.paper - 1

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {**asdict(self), "difference": self.difference}
