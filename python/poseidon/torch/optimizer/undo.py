"""Copies of what a training step overwrites, with which the step is undone if it cannot be completed."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from poseidon.torch.tensors.shard import part_of


class TensorCopies:
    """Copies of tensors, in memory that is used again."""

    def __init__(self) -> None:
        self._copies: list[torch.Tensor] = []

    def take(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copies these tensors; what was copied before is gone."""
        if len(tensors) != len(self._copies) or not all(map(_alike, tensors, self._copies)):
            self._copies = [torch.empty_like(tensor, requires_grad=False) for tensor in tensors]
        _copy(self._copies, tensors)

    def put_back(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrites the same tensors with what they were."""
        _copy(tensors, self._copies)


@dataclass
class _Saved:
    """One parameter and its optimizer state as they were before the update of an attempt."""

    attempt: int
    value: torch.Tensor
    state: dict[str, Any] | None  # None: the optimizer had none


class UpdateUndo:
    """The values that one optimizer's last update of each parameter has overwritten."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._saved: dict[torch.Tensor, _Saved] = {}

    def save(self, params: Sequence[torch.Tensor], attempt: int) -> None:
        """Called before these parameters are updated; a second update in one attempt is undone with the first."""
        copies: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for param in params:
            saved = self._saved.get(param)
            if saved is not None and saved.attempt == attempt:
                continue
            if saved is None or not _alike(saved.value, param):
                saved = _Saved(attempt, torch.empty_like(param, requires_grad=False), None)
                self._saved[param] = saved
            saved.attempt = attempt
            copies.append(saved.value)
            sources.append(param)
            saved.state = _copied(self._optimizer.state.get(param), saved.state or {}, copies, sources)
        _copy(copies, sources)

    def reaches(self, step: int, pending: Mapping[torch.Tensor, int]) -> bool:
        """Whether all parameters are, or can be put back to what they were, at the beginning of this step.

        `pending`: parameters whose update is still to be made, and the step that it belongs to.
        """
        return all(attempt >= step for attempt in pending.values()) and all(
            saved.attempt <= step for saved in self._saved.values()
        )

    def go_back(self, step: int) -> None:
        """Undoes the updates of this step. What was undone cannot be undone again."""
        targets: list[torch.Tensor] = []
        copies: list[torch.Tensor] = []
        for param, saved in self._saved.items():
            if saved.attempt != step:
                continue
            saved.attempt = -1
            targets.append(param)
            copies.append(saved.value)
            self._put_back_state(param, saved.state, targets, copies)
        _copy(targets, copies)

    def _put_back_state(
        self, param: torch.Tensor, saved: dict[str, Any] | None, targets: list[torch.Tensor], copies: list[torch.Tensor]
    ) -> None:
        if saved is None:
            self._optimizer.state.pop(param, None)
            return
        state = self._optimizer.state[param]
        for name in set(state) - set(saved):
            del state[name]
        for name, value in saved.items():
            now = state.get(name)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and _alike(now, value):
                targets.append(now)
                copies.append(value)
            else:
                state[name] = copy.deepcopy(value)

    def confirm(self) -> None:
        """What has been saved is not to be put back any more; its memory is used again."""
        for saved in self._saved.values():
            saved.attempt = -1


def _copied(
    state: Mapping[str, Any] | None,
    before: Mapping[str, Any],
    copies: list[torch.Tensor],
    sources: list[torch.Tensor],
) -> dict[str, Any] | None:
    """A copy of one parameter's state; for tensors only where to copy is noted, in memory of `before` where it fits."""
    if state is None:
        return None
    result = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            result[name] = copy.deepcopy(value)
            continue
        old = before.get(name)
        result[name] = old if isinstance(old, torch.Tensor) and _alike(old, value) else torch.empty_like(value)
        copies.append(result[name])
        sources.append(value)
    return result


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(list(map(part_of, targets)), list(map(part_of, sources)))
