"""Training while ranks run out of data at different times (`DistributedDataParallel.join`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

from poseidon.adapter.control import Control
from poseidon.adapter.features import Features
from poseidon.errors import Mismatch, PoseidonError

_ACTIVE = 1
_SYNCHRONIZES = 2
_SENDS_BUFFERS = 4
_OTHER = 8  # times the place in what follows, from 1
_OTHERS = ("unjoined", "unjoined_averaging", "unjoined_call")  # features: what takes all ranks, beside the joined model


class JoinedModel(Protocol):
    """What joined training uses of a framework's model."""

    features: Features

    def enter_join(self, joined: JoinedTraining) -> None:
        """The join is certainly under way. Raises InvalidArgument if something excludes it."""

    def divide_by(self, divisor: int) -> None:
        """Sets the number by which the sum over the ranks is divided, from the next exchange on."""

    def shadow(self) -> None:
        """Takes part in the other ranks' backward without contributing."""

    def broadcast_buffers(self, root: int) -> None:
        """Collective: overwrites the model's buffers with those of `root`."""

    def broadcast_last_state(self, root: int) -> None:
        """Collective: overwrites the whole model with that of `root`."""


class JoinedTraining:
    """One `with model.join():` on this rank. Every forward begins with one small exchange of flags."""

    def __init__(
        self,
        model: JoinedModel,
        control: Control,
        divide_by_initial_world_size: bool,
        throw_on_early_termination: bool,
        call_idle: Callable[[], None],
        joinables: object,
    ) -> None:
        """`call_idle` makes ranks without data, which wait in something else, ask for the flags. `joinables` stands for
        all models that are joined together."""
        self.joinables = joinables
        self._model = model
        self._control = control
        self._divide_by_initial = divide_by_initial_world_size
        self._throw = throw_on_early_termination
        self._call_idle = call_idle
        self._last_active: int | None = None  # a rank that took part in the latest step

    def _exchange_flags(self, own: int) -> list[int]:
        flags = [row[0] for row in self._control.one_hot([own])]
        active = [rank for rank, flag in enumerate(flags) if flag & _ACTIVE]
        if active:
            self._last_active = active[-1]  # as torch's class, which takes the highest one
            self._model.divide_by(len(flags) if self._divide_by_initial else len(active))
        if len(active) < len(flags):
            self._model.enter_join(self)
            self._model.features.add("out_of_data")
        if self._throw and len(active) < len(flags):
            finished = [rank for rank, flag in enumerate(flags) if not flag & _ACTIVE]
            raise PoseidonError(f"rank(s) {finished} ran out of inputs, and join() was told to raise then")
        return flags

    def notify_forward(self, synchronizes: bool, sends_buffers: bool) -> int:
        """Notes that this rank starts a step. Returns the rank whose buffers all ranks take.

        Raises InvalidArgument on all ranks if one begins something else, as `notify_other`, and Mismatch if ranks begin
        passes of different kinds.
        """
        flags = self._exchange_flags(_ACTIVE | _SYNCHRONIZES * synchronizes | _SENDS_BUFFERS * sends_buffers)
        _check_alike(flags)
        assert self._last_active is not None
        return self._last_active

    def notify_other(self, what: str) -> None:
        """This rank begins something that takes all ranks and is no step of the joined model: a feature of `_OTHERS`.

        Raises InvalidArgument on all ranks if one has no data, also one that is still inside the join().
        """
        self._call_idle()
        kind = 1 + _OTHERS.index(what)
        flags = self._exchange_flags(_ACTIVE | _OTHER * kind)
        if any(flag // _OTHER != kind for flag in flags):
            _refuse_other(flags)

    def shadow_others(self) -> None:
        """Takes part in the others' steps until no rank has data any more. This rank has none."""
        while self.shadow_step():
            pass
        self.take_last_model()

    def shadow_step(self) -> bool:
        """Takes part in the others' next step, if there is one. Returns whether there was one."""
        flags = self._exchange_flags(0)
        if not any(flags):
            return False
        _check_alike(flags)
        assert self._last_active is not None
        step = flags[self._last_active]
        if step & _SENDS_BUFFERS:
            self._model.broadcast_buffers(self._last_active)
        if step & _SYNCHRONIZES:
            self._model.shadow()
        return True

    def take_last_model(self) -> None:
        """Gives all ranks the model of a rank that trained longest. Collective, when no rank has data."""
        if self._last_active is not None:
            self._model.broadcast_last_state(self._last_active)


def _check_alike(flags: Sequence[int]) -> None:
    """All ranks that have data make the same kind of step, or all ranks raise the same error."""
    if any(flag >= _OTHER for flag in flags):
        _refuse_other(flags)
    if len({flag for flag in flags if flag}) > 1:
        shown = "; ".join(f"rank {rank}: {_shown(flag)}" for rank, flag in enumerate(flags) if flag)
        raise Mismatch(
            f"inside join(), ranks that have data began forward passes of different kinds ({shown}): make the same "
            "passes on all of them, or evaluate after the join()"
        )


def _shown(flag: int) -> str:
    kind = "to exchange gradients" if flag & _SYNCHRONIZES else "without exchange"
    return f"{kind}, after buffers" if flag & _SENDS_BUFFERS else kind


def _refuse_other(flags: Sequence[int]) -> NoReturn:
    """With the same text on all ranks."""
    Features.refuse(_OTHERS[max(flags) // _OTHER - 1], "out_of_data")
