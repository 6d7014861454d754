"""The log of choices: from which step on which layer took which scheme. Two runs with the same log have equal bits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from poseidon.errors import InvalidArgument


@dataclass(frozen=True)
class LoggedChoice:
    """One choice. It holds while the layer's mean K is at least half of `factor_count` and at most twice as much."""

    step: int  # the first with it; steps are counted as `Recovery.step`, or from 0 if there is no Recovery
    layer: str
    scheme: str
    factor_count: int
    reason: str = ""


class ChoiceLog:
    """The choices of one model, in the order of their steps. All ranks have the same log."""

    def __init__(self, choices: Iterable[LoggedChoice] = ()) -> None:
        self._choices = sorted(choices, key=lambda choice: choice.step)

    def __len__(self) -> int:
        return len(self._choices)

    @property
    def last_step(self) -> int:
        """The step of the last choice, or -1."""
        return self._choices[-1].step if self._choices else -1

    def add(self, choice: LoggedChoice) -> None:
        """Adds a choice, which is not earlier than the last one."""
        self._choices.append(choice)

    def at(self, step: int) -> list[LoggedChoice]:
        """The choices that are made at this step."""
        return [choice for choice in self._choices if choice.step == step]

    def in_force(self, step: int) -> dict[str, LoggedChoice]:
        """The last choice for each layer up to this step."""
        return {choice.layer: choice for choice in self._choices if choice.step <= step}

    def plain(self) -> list[dict[str, Any]]:
        """The log as plain data, for JSON and checkpoints."""
        return [asdict(choice) for choice in self._choices]

    @staticmethod
    def of(plain: Any, schemes: Mapping[str, Iterable[str]] | None = None) -> ChoiceLog:
        """The log that `plain` returned. `schemes`: those that each layer may take, if they are known.

        Raises InvalidArgument for something else, or for the log of another model.
        """
        try:
            choices = [LoggedChoice(**one) for one in plain]
            whole = all(type(number) is int for one in choices for number in (one.step, one.factor_count))
        except TypeError:
            whole = False
        if not whole:
            raise InvalidArgument("this is no log of choices: give what choices() of the other run's model returned")
        for one in choices:
            if schemes is not None and one.scheme not in schemes.get(one.layer, ()):
                raise InvalidArgument(
                    f"the log of choices says that layer {one.layer!r} takes scheme {one.scheme!r}, which it may not "
                    "take here: replay a log with the same model, number of workers and options"
                )
        return ChoiceLog(choices)
