"""`TrainingState`: what `Recovery` needs from a framework. Each framework implements it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from poseidon.adapter.arrays import Bytes, StateArrays
from poseidon.errors import PoseidonError


class RandomStreams(Protocol):
    """The states of a process's random streams at one moment."""

    def put_back(self) -> None:
        """Makes the streams go on from these states again."""


class TrainingState(Protocol):
    """The models, optimizers and other objects that a training changes, at its present step.

    Use it from the thread that trains. `collect` returns plain data and arrays (`adapter/state_text.py`).
    """

    arrays: StateArrays
    """The framework's arrays."""

    on_servers: bool
    """Whether servers hold parameters; all ranks then go back to a version that these have saved."""

    def describe(self) -> str:
        """A text about everything that must be the same on all ranks."""

    def check_exchange(self) -> None:
        """Raises InvalidArgument if training could not go on after a failure of the exchange that begins now."""

    # Of a step.

    def begin(self, step: int, rank: int) -> None:
        """Begins an attempt at this step: notes its first state, clears gradients, and seeds the random streams."""

    def end(self) -> None:
        """Ends the attempt, whose work is done when this returns.

        Raises InvalidArgument if the servers, which count pushes, count other steps. It may raise what `failure_of`
        knows.
        """

    def failure_of(self, error: BaseException) -> PoseidonError | None:
        """The failure of another worker or the network that the framework has told by this error, or None."""

    def settle(self) -> None:
        """Waits until all updates are made."""

    def streams(self) -> RandomStreams | None:
        """The present states of the random streams, or None if every attempt seeds them."""

    # After a failure.

    def whole_steps(self, step: int) -> Sequence[int]:
        """Those of this step and the one before whose beginning can be restored."""

    def go_back(self, step: int) -> None:
        """Restores the beginning of this step, which `whole_steps` has named. The client must have ended."""

    def connect_models(self) -> None:
        """Connects the models to the job's present membership. Servers have no values yet. Collective."""

    def agree(self) -> None:
        """Makes the models' logs of choices the same on all ranks. Collective."""

    def decisions(self) -> list[int]:
        """The results of searches so far, as numbers; -1 means none yet. All ranks have the same number of them."""

    def resume(self, step: int, decisions: Sequence[int]) -> None:
        """Makes exchanges go on with the schemes of this step and with these results of searches."""

    # To and from other processes and files.

    def collect(self, step: int, whole: bool = True) -> dict[str, Any]:
        """The state at the beginning of this step, without copies. Without `whole`, what servers hold is left out."""

    def load(self, state: dict[str, Any], step: int, whole: bool = True) -> None:
        """Takes the state that another process had at the beginning of this step. Its arrays become the objects'.

        Raises Mismatch, before anything is changed, if it belongs to other models. `whole` is that of `collect`.
        """

    # Of lossy schemes: what this rank has not sent yet.

    def residuals(self) -> Bytes | None:
        """What lossy schemes have not sent at the present beginning of a step, of one size on all ranks.

        None if no layer takes a lossy scheme.
        """

    def note_residuals(self) -> None:
        """Notes what lossy schemes have not sent after the failed attempt. The client has failed, and not ended."""

    def take_residuals(self, residuals: Bytes | None) -> None:
        """Makes these the residuals with which `resume` goes on. None: they are lost."""

    # With `on_servers`.

    def restorable(self) -> list[tuple[str, int, Any]]:
        """Names, layers and host arrays of what servers take from a checkpoint (`poseidon.restore.restore`)."""

    def connect_servers(self, restored: bool) -> None:
        """Connects to the servers of the present membership. Collective.

        `restored` says that they have the values of a checkpoint. Otherwise they get rank 0's.
        """


@runtime_checkable
class OwnState(TrainingState, Protocol):
    """A state of which every rank has its own, as in training that exchanges only now and then.

    `load` is collective. `collect` without `whole` leaves out what only rank 0 has to load.
    """

    def has_exchanged(self) -> bool:
        """Whether the ranks have exchanged after the last step, or before the first. The same on all ranks."""

    def start(self) -> None:
        """Makes all ranks begin with rank 0's models. Collective."""
