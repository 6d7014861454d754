"""What `Recovery` needs of a framework: `TrainingState`, which each framework implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from poseidon.adapter.arrays import Arrays


class RandomStreams(Protocol):
    """Where the random streams of a process were."""

    def put_back(self) -> None:
        """The streams go on from there again."""


class TrainingState(ABC):
    """The models, optimizers and other objects that a training changes, at the step that it is at.

    Used from the thread that trains. What `collect` returns is plain data and arrays (`adapter/state_text.py`).
    """

    arrays: Arrays
    """The framework's arrays."""

    on_servers: bool
    """Whether servers hold parameters; all ranks then go back to a version that these have saved."""

    @abstractmethod
    def describe(self) -> str:
        """What must be the same on all ranks, as text."""

    @abstractmethod
    def check_exchange(self) -> None:
        """InvalidArgument if a failure of the exchange that begins now could not be survived."""

    # Of a step.

    @abstractmethod
    def begin(self, step: int, rank: int) -> None:
        """An attempt at this step begins: notes what it starts from, clears gradients, seeds the random streams."""

    @abstractmethod
    def end(self) -> None:
        """The attempt ends: InvalidArgument if the versions of servers, which count pushes, count it otherwise."""

    @abstractmethod
    def settle(self) -> None:
        """Waits until all updates are made."""

    @abstractmethod
    def streams(self) -> RandomStreams | None:
        """Where the random streams are now; None where every attempt seeds them."""

    # After a failure.

    @abstractmethod
    def whole_step(self, step: int) -> int:
        """The latest step, this one or the one before, whose beginning can be put back; -1 if none can."""

    @abstractmethod
    def go_back(self, step: int) -> None:
        """Puts back the beginning of this step, one that `whole_step` named. The client must have ended."""

    @abstractmethod
    def connect_models(self) -> None:
        """Collective: the models become part of the job's present membership; servers have no values yet."""

    @abstractmethod
    def decisions(self) -> list[int]:
        """What searches have found so far, as numbers; -1: nothing yet. Equally many on all ranks."""

    @abstractmethod
    def resume(self, step: int, decisions: Sequence[int]) -> None:
        """Exchanges go on with the schemes of this step and with these decisions of searches."""

    # To and from other processes and files.

    @abstractmethod
    def collect(self, step: int, whole: bool = True) -> dict[str, Any]:
        """The state at the beginning of this step, where it is now. Not `whole`: without what servers hold."""

    @abstractmethod
    def load(self, state: dict[str, Any], step: int, whole: bool = True) -> None:
        """Takes over the state that another process had at the beginning of this step; its arrays become the objects'.

        Mismatch, before anything is changed, if it is that of other models. `whole` as it was for `collect`.
        """

    # With `on_servers`.

    @abstractmethod
    def restorable(self) -> list[tuple[str, int, Any]]:
        """Names, layers and host arrays for what `poseidon.restore.restore` is to have servers take."""

    @abstractmethod
    def connect_servers(self, restored: bool) -> None:
        """Collective: from here on the servers are those of the present membership.

        `restored`: they have the values of a checkpoint. Otherwise they get rank 0's.
        """
