"""The hyperparameters of an optimizer, as they are compared between the ranks."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.optim import Optimizer

from poseidon.torch.optimizer.wrapper import NO_HYPERPARAMETERS

_LARGEST = 64  # elements of a tensor that is looked at


class ComparedHyperparameters:
    """Of one optimizer: those of all its groups, and how often its state was loaded and a step was made.

    For `StepCheck`. A group is looked at again only if something of it has changed. Not `counts`: no calls are counted,
    because `Recovery` repeats some, and brings workers that have made none.
    """

    def __init__(self, optimizer: Optimizer, counts: bool) -> None:
        self._optimizer = optimizer
        self._counts = counts
        self._name = type(optimizer).__name__
        self._loads = self._steps = 0
        self._sent = (0, 0)  # these two, as `digest` last had them
        self._known: list[tuple[tuple[Any, ...], list[tuple[str, str]], bytes]] = []  # by group: values, texts, digest

    def loaded(self) -> None:
        """A state was loaded."""
        self._loads += self._counts

    def stepped(self) -> None:
        """Notes a call of step(). One with learning rates of 0 only makes state, perhaps on a rank that saves it."""
        if any(float(group.get("lr") or 0) != 0 or "lr" not in group for group in self._optimizer.param_groups):
            self._steps += self._counts

    def digest(self) -> bytes:
        """See `Compared`."""
        groups = self._optimizer.param_groups
        del self._known[len(groups) :]
        for number, group in enumerate(groups):
            values = tuple(value for key, value in group.items() if key not in NO_HYPERPARAMETERS)
            if number < len(self._known) and _same(self._known[number][0], values):
                continue
            texts = [(key, _text(group[key])) for key in sorted(group, key=str) if key not in NO_HYPERPARAMETERS]
            entry = (values, texts, hashlib.blake2b(repr(texts).encode(), digest_size=8).digest())
            self._known[number : number + 1] = [entry]
        self._sent = (self._loads, self._steps)
        return b"".join([digest for _, _, digest in self._known]) + repr(self._sent).encode()

    def lines(self) -> list[str]:
        """See `Compared`."""
        loads, steps = self._sent
        return [
            *(
                f"{key} of parameter group {number} of {self._name}\t{text}"
                for number, (_, texts, _) in enumerate(self._known)
                for key, text in texts
            ),
            f"the number of load_state_dict() calls of {self._name}\t{loads}",
            f"the number of step() calls of {self._name} since the last backward pass\t{steps}",
        ]

    def sent(self) -> None:
        """See `Compared`."""
        self._steps = 0


def _same(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    if any(isinstance(value, torch.Tensor) for value in now):
        return False
    try:
        return bool(before == now)
    except Exception:  # of some class of the program's; then it is described again
        return False


def _text(value: Any) -> str:
    """The same text for the same value on every rank: no addresses, no devices."""
    if value is None or isinstance(value, (bool, str)):
        return repr(value)
    if isinstance(value, (int, float)):
        return repr(float(value))
    if isinstance(value, torch.Tensor):
        seen = value.device.type == "cpu" and value.numel() <= _LARGEST and not value.is_sparse
        return _text(value.tolist()) if seen else f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_text, value))})"
    return f"a {type(value).__name__}"
