"""The types of options and arguments that need not be given.

Typer before 0.15 reads only this spelling on Python 3.10.
"""

from __future__ import annotations

from pathlib import Path
from typing import Optional

OptionalText = Optional[str]  # noqa: UP045
OptionalTexts = Optional[list[str]]  # noqa: UP045
OptionalWhole = Optional[int]  # noqa: UP045
OptionalNumber = Optional[float]  # noqa: UP045
OptionalPath = Optional[Path]  # noqa: UP045
OptionalPaths = Optional[list[Path]]  # noqa: UP045
OptionalFlag = Optional[bool]  # noqa: UP045
