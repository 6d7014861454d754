"""The state of a training whose steps are compiled: what all such frameworks have alike.

Nothing of a step is in flight when its attempt has ended, schemes are those of the compiled step, and no scheme keeps
something for a later one.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

from poseidon.adapter.arrays import Bytes
from poseidon.adapter.membership import Membership
from poseidon.adapter.numpy_arrays import NUMPY_ARRAYS
from poseidon.adapter.random_streams import HostStreams, seed_host_streams, step_seed
from poseidon.adapter.training_state import TrainingState
from poseidon.errors import SURVIVABLE, Mismatch, PoseidonError


class CompiledState(TrainingState, abc.ABC):
    """The values that a training changes, at its present step. Use it from the thread that trains.

    Where workers may be lost it keeps the beginning of the present step.
    """

    arrays = NUMPY_ARRAYS
    on_servers = False

    framework_errors: tuple[type[BaseException], ...] = ()
    """What the framework raises where compiled code has failed, also if an exchange has."""

    def __init__(self, seed: int | None, here: Membership) -> None:
        self._seed, self._here, self._recovers = seed, here, here.recovers
        self._beginning: tuple[int, Any, HostStreams] | None = None  # the step, its values, and the streams there
        self._streams_left: HostStreams | None = None  # where a failed attempt has left them
        self._taken: Sequence[Any] | None = None  # values of others, with which the next attempt begins

    @property
    def recovers(self) -> bool:
        """Whether workers may be lost."""
        return self._recovers

    @abc.abstractmethod
    def values(self) -> list[Any]:
        """The present values, in host memory or where they are, of kinds that a state may contain."""

    @abc.abstractmethod
    def take_values(self, values: Sequence[Any]) -> None:
        """Makes these the present values. They are of the kinds that `values` has."""

    @abc.abstractmethod
    def kept_values(self) -> Any:
        """What `put_back` needs to restore the present values. None of it is changed by a step."""

    @abc.abstractmethod
    def put_back(self, kept: Any) -> None:
        """Restores values that `kept_values` has kept."""

    def is_whole(self, kept: Any) -> bool:
        """Whether they can still be restored."""
        return True

    # Of a step.

    def check_exchange(self) -> None:
        """Every exchange of an attempt can be made again."""

    def begin(self, step: int, rank: int) -> None:
        """Keeps what the attempt begins with, and seeds the streams."""
        # What a loop has changed since then by itself, such as a learning rate, they have already.
        taken, self._taken = self._taken, None
        if taken is not None:
            self.take_values(taken)
        if self._recovers:
            self._beginning = (step, self.kept_values(), HostStreams())
        if self._seed is not None:
            seed_host_streams(step_seed(self._seed, rank, step))

    def end(self) -> None:
        """Raises the failure of an exchange of the attempt, also where the program has caught it."""
        client = self._here.client
        if self._recovers and client is not None and client.failure is not None:
            raise client.failure

    def failure_of(self, error: BaseException) -> PoseidonError | None:
        """The failure that the client knows, where the framework has an error of its own for it."""
        if self._here.own_failure is not None:
            return None
        if isinstance(error, SURVIVABLE):
            return error
        client = self._here.client
        if isinstance(error, self.framework_errors) and client is not None:
            return client.failure if isinstance(client.failure, SURVIVABLE) else None
        return None

    def settle(self) -> None:
        """All updates have been made when an attempt ends."""

    def streams(self) -> HostStreams | None:
        """Where the streams are, or None if every attempt seeds them."""
        return None if self._seed is not None else HostStreams()

    # After a failure.

    def whole_steps(self, step: int) -> list[int]:
        """This step, if its beginning was kept and is still there."""
        kept = self._beginning
        return [step] if kept is not None and kept[0] == step and self.is_whole(kept[1]) else []

    def go_back(self, step: int) -> None:
        """Restores the beginning of the present step."""
        assert self._beginning is not None
        self._streams_left = self.streams()
        _, kept, streams = self._beginning
        self.put_back(kept)
        if self._seed is None:
            streams.put_back()

    def agree(self) -> None:
        """Schemes follow from the compiled steps, which all ranks have alike."""

    def decisions(self) -> list[int]:
        """Nothing is searched for."""
        return []

    def resume(self, step: int, decisions: Sequence[int]) -> None:
        """Schemes are chosen when the step is compiled."""

    # To and from other processes and files.

    def collect(self, step: int, whole: bool = True) -> dict[str, Any]:
        """The present values."""
        return {"values": self.values()}

    def load(self, state: dict[str, Any], step: int, whole: bool = True) -> None:
        """Takes the values of another process. Raises Mismatch, before anything is changed, for those of others."""
        own, found = [[self.arrays.kind_of(one) for one in values] for values in (self.values(), state["values"])]
        if own != found:
            raise Mismatch(
                "the state is that of other arrays: start all workers from the same code, and with a new directory if "
                "these are old snapshots"
            )
        self.take_values(state["values"])
        self._beginning, self._taken = None, state["values"]
        if self._streams_left is not None:  # the failed attempt is not made again here: another rank has completed it
            self._streams_left.put_back()

    # No scheme is lossy.

    def residuals(self) -> Bytes | None:
        """None: everything was sent."""
        return None

    def note_residuals(self) -> None:
        """There are none."""

    def take_residuals(self, residuals: Bytes | None) -> None:
        """There are none."""

    # No server keeps parameters.

    def restorable(self) -> list[tuple[str, int, Any]]:
        """Nothing: no server keeps a value."""
        return []

    def connect_servers(self, restored: bool) -> None:
        """No server keeps a value."""
