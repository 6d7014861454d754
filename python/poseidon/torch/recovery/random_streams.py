"""The random streams of a training step: torch's (CPU and CUDA), NumPy's and Python's own."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Collection
from typing import Any

import torch


def seed_streams(seed: int, rank: int, step: int) -> None:
    """Seeds all streams so that a step draws the same numbers whenever, and by whatever process, it is done."""
    digest = hashlib.blake2b(f"{seed} {rank} {step}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little") >> 1
    torch.manual_seed(number)
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number % 2**32)


class StreamStates:
    """The present states of this process's streams, to which it can go back. `devices` are the CUDA devices in use."""

    def __init__(self, devices: Collection[torch.device]) -> None:
        self._torch = torch.get_rng_state()
        self._cuda = {device: torch.cuda.get_rng_state(device) for device in devices}
        self._python = random.getstate()
        self._numpy: Any = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None

    def put_back(self) -> None:
        """The streams go on from there again."""
        torch.set_rng_state(self._torch)
        for device, state in self._cuda.items():
            torch.cuda.set_rng_state(state, device)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
