"""Fragments of a model's parameters: each is averaged at a step of its own, while later steps compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from poseidon import _core
from poseidon.adapter.control import Control
from poseidon.errors import InvalidArgument, Mismatch
from poseidon.torch.local_sgd.averaging import Averaging
from poseidon.torch.model.parameters import SyncedParameter

_PAPERS_MIX = 0.5  # Streaming DiLoCo, Douillard et al. 2025


@dataclass(frozen=True)
class Streaming:
    """When the fragments of a model are averaged. Raises InvalidArgument for numbers that do not fit each other.

    Of `count` fragments number f is sent after step (f + 1) · every // count of each period of `every` steps. What
    comes back counts `overlap_steps` later: a parameter becomes `mix` times itself plus 1 − `mix` times that.
    """

    every: int
    count: int
    overlap_steps: int
    mix: float

    @staticmethod
    def of(every: int, fragments: int, overlap_steps: int, mix: float | None) -> Streaming:
        """`mix` None is the default: that of the paper, or 0 if nothing overlaps."""
        if not _is_whole(fragments) or not 1 <= fragments <= every:
            raise InvalidArgument(
                f"fragments is {fragments!r}: it is the number of parts of the model, from 1 to every"
            )
        if not _is_whole(overlap_steps) or not 0 <= overlap_steps <= every // fragments:
            raise InvalidArgument(
                f"overlap_steps is {overlap_steps!r}: a fragment has to arrive before the next one is sent, so it is a "
                f"whole number from 0 to {every // fragments}"
            )
        if mix is not None and not (0 <= mix < 1 and (overlap_steps or mix == 0)):
            raise InvalidArgument(
                f"mix is {mix!r}: it is the share of a worker's own parameters, from 0 to less than 1, and 0 without "
                "overlap_steps"
            )
        return Streaming(
            every, fragments, overlap_steps, (_PAPERS_MIX if overlap_steps else 0.0) if mix is None else mix
        )

    @property
    def is_plain(self) -> bool:
        """Whether all parameters are averaged at once, so that replicas are equal afterwards."""
        return self.count == 1 and self.overlap_steps == 0

    def __str__(self) -> str:
        text = f"every {self.every}"
        if self.is_plain:
            return text
        return f"{text}, fragments {self.count}, overlap_steps {self.overlap_steps}, mix {self.mix}"

    def due(self, position: int) -> int | None:
        """The fragment that is sent after so many steps of a period."""
        ends = {(number + 1) * self.every // self.count: number for number in range(self.count)}
        return ends.get(position)

    def cut(self, found: Sequence[SyncedParameter]) -> list[list[SyncedParameter]]:
        """The fragments: parameters side by side, of about equally many bytes."""
        if self.count > len(found):
            raise InvalidArgument(
                f"fragments is {self.count}, and the model has {len(found)} parameters to average: give at most as many"
            )
        left_bytes = sum(entry.param.nbytes for entry in found)  # with those of the last part
        parts: list[list[SyncedParameter]] = [[]]
        part_bytes = 0
        for index, entry in enumerate(found):
            missing = self.count - len(parts)
            is_full = part_bytes * (missing + 1) >= left_bytes
            if parts[-1] and missing and (is_full or len(found) - index == missing):
                left_bytes, part_bytes = left_bytes - part_bytes, 0
                parts.append([])
            parts[-1].append(entry)
            part_bytes += entry.param.nbytes
        return parts


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class Fragments:
    """The averagings of a model's fragments. One at a time is under way. Use it from the thread that trains."""

    def __init__(self, averagings: Sequence[Averaging], plan: Streaming, written: Callable[[], None]) -> None:
        """`written` is told when parameters have been written to."""
        self._averagings, self._plan, self._written = averagings, plan, written
        self._pending: int | None = None  # sent, and not in the parameters yet
        self._left = 0  # steps until it is

    def connect(self, client: _core.Client, control: Control) -> None:
        """Collective: exchanges go through this client from now on. What was under way is dropped."""
        self._pending = None
        for one in self._averagings:
            one.connect(client, control)

    @property
    def entries(self) -> list[SyncedParameter]:
        """What is averaged, of all fragments."""
        return [entry for one in self._averagings for entry in one.entries]

    def step(self) -> None:
        """A step has been made: takes what has overlapped with as many steps as it is to."""
        self._left -= 1
        if self._pending is not None and self._left == 0:
            self._finish()

    @torch.no_grad()
    def send(self, number: int) -> None:
        """Collective: sends a fragment."""
        self._averagings[number].start(overlaps=self._plan.overlap_steps > 0)
        self._pending, self._left = number, self._plan.overlap_steps
        if self._left == 0:
            self._finish()

    @torch.no_grad()
    def _finish(self) -> None:
        if self._pending is not None:
            self._averagings[self._pending].finish(self._plan.mix)
            self._pending = None
            self._written()

    @torch.no_grad()
    def average(self) -> None:
        """Collective: makes all parameters equal on all ranks."""
        self._finish()
        for one in self._averagings:
            one.start(overlaps=False)
        for one in self._averagings:
            one.finish(mix=0.0)
        self._written()

    @property
    def is_under_way(self) -> bool:
        """Whether a fragment was sent whose mean is not in the parameters yet."""
        return self._pending is not None

    def drop_pending(self) -> None:
        """Forgets the fragment that is under way, because the parameters are others now. It waits for its exchange."""
        if self._pending is not None:
            self._averagings[self._pending].settle()
            self._pending = None

    def take_over(self) -> None:
        """Collective: rank 0's parameters are those of all ranks now; nothing has been trained since."""
        self.drop_pending()
        for one in self._averagings:
            one.take_over()

    def state(self, whole: bool = True) -> dict[str, Any] | None:
        """What is kept beside the parameters, as plain data and tensors. Not collective: it waits for what was sent.

        Not `whole`: without what servers hold.
        """
        result = None
        if self._pending is not None:
            self._averagings[self._pending].settle()
            result = self._averagings[self._pending].result()
        if self._plan.is_plain:
            return self._averagings[0].state(whole)
        return {
            "fragments": [one.state(whole) for one in self._averagings],
            "pending": self._pending,
            "left": self._left,
            "result": result,
        }

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Collective: takes what `state` has returned. What servers hold is rank 0's."""
        parts = None if state is None else state.get("fragments")
        if (parts is None) != self._plan.is_plain or (parts is not None and len(parts) != self._plan.count):
            raise Mismatch(
                "the checkpoint is of a LocalSGD with other fragments: pass the same fragments and overlap_steps as "
                "when it was saved"
            )
        self.drop_pending()
        if state is None or parts is None:
            self._averagings[0].load(state)
            return
        for one, part in zip(self._averagings, parts, strict=True):
            one.load(part)
        if state["pending"] is not None:
            self._pending, self._left = state["pending"], state["left"]
            self._averagings[state["pending"]].restore(state["result"])
