"""What a check has found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """`about`: what was looked at. `text`: one sentence that says what is wrong. `mend`: the command that mends it."""

    about: str
    text: str
    mend: str
