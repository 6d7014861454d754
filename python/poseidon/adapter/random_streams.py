"""The random streams of a process that belong to no framework: Python's and NumPy's."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any


def step_seed(seed: int, rank: int, step: int) -> int:
    """A number from 0 to 2**63 - 1 with which a step draws the same whenever, and by whatever process, it is made."""
    digest = hashlib.blake2b(f"{seed} {rank} {step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_host_streams(number: int) -> None:
    """Seeds Python's stream, and NumPy's if the program has imported it."""
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number % 2**32)


class HostStreams:
    """The present states of these streams, to which the process can go back."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy: Any = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None

    def put_back(self) -> None:
        """The streams go on from there again."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
