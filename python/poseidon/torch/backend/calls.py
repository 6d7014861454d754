"""Which collectives are under way, and where the program has called them: for errors that name what ranks call."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

# This package, torch and Python's library.
_OWN = tuple(
    f"{folder}{os.sep}" for folder in (Path(__file__).parents[2], *map(os.path.dirname, (torch.__file__, os.__file__)))
)
_MOST_TOLD = 3
_TELL_S = 3.0
_POLL_S = 0.02
_LOOK_AFTER = 256


def call_site() -> tuple[str, int]:
    """File and line of the program that called torch.distributed."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


class Calls:
    """The calls of a client that have not been waited for. `done(call)` says whether one is over."""

    def __init__(self, store: Any, rank: int, ranks: int, done: Any) -> None:
        self._store, self._rank, self._ranks, self._done = store, rank, ranks, done
        self._calls: dict[int, tuple[str, str, Sequence[Any], tuple[str, int]]] = {}

    def begin(self, call: int, group: str, what: str, tensors: Sequence[torch.Tensor]) -> None:
        """Notes a call of this group, made where the program is now, of these tensors."""
        if len(self._calls) >= _LOOK_AFTER:
            for one in list(self._calls):
                if self._done(one):
                    self.end(one)
        shapes = [(tensor.dtype, tensor.shape) for tensor in tensors[:2]]
        self._calls[call] = (group, what, shapes, call_site())

    def end(self, call: int) -> None:
        """It is over, and somebody knows."""
        self._calls.pop(call, None)

    def describe(self, call: int) -> str:
        """Such as "all_reduce of float32 (40, 3) in group 'default', called at train.py:12"."""
        if call not in self._calls:
            return "a collective that has ended"
        group, what, shapes, (file, line) = self._calls[call]
        of = ", ".join(f"{str(dtype).removeprefix('torch.')} {tuple(shape)}" for dtype, shape in shapes)
        return f"{what}{' of ' + of if of else ''} in group {group!r}, called at {file}:{line}"

    def of_all_ranks(self) -> str:
        """What each rank had under way when the job ended because their calls differ, as far as they say so soon."""
        own = ", and ".join(self.describe(call) for call in list(self._calls)[:_MOST_TOLD]) or "nothing"
        texts = {self._rank: own}
        deadline = time.monotonic() + _TELL_S
        try:
            self._store.set(f"poseidon/calls/{self._rank}", own)
            while len(texts) < self._ranks and time.monotonic() < deadline:
                for rank in set(range(self._ranks)) - set(texts):
                    if self._store.check([f"poseidon/calls/{rank}"]):
                        texts[rank] = self._store.get(f"poseidon/calls/{rank}").decode()
                time.sleep(_POLL_S)
        except Exception:  # the store's process may have ended
            pass
        return "; ".join(f"rank {rank}: {text}" for rank, text in sorted(texts.items()))
