"""Clipping by the norm of all gradients together, for updates that are made layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from poseidon.errors import InvalidArgument

CLIPS = ("gathered", "previous")
_EPSILON = 1e-6  # of torch.nn.utils.clip_grad_norm_


class StepClipping:
    """One step's scaling of gradients, by the total norm `norm`, as they arrive."""

    def __init__(self, max_norm: float, norm: torch.Tensor) -> None:
        self.norms: dict[torch.Tensor, torch.Tensor] = {}  # of each gradient as it was, by parameter
        self._scale = torch.clamp(max_norm / (norm + _EPSILON), max=1.0)

    def clip(self, params: Sequence[torch.Tensor]) -> None:
        """Scales the gradients of these parameters in place."""
        for param in params:
            grad = param.grad
            assert grad is not None
            self.norms[param] = torch.linalg.vector_norm(grad)
            grad.mul_(self._scale.to(grad.device))


class Clipping:
    """Limits the 2-norm of all of an optimizer's gradients together to `max_norm`.

    With `clip` "gathered" it uses the norm of this step's gradients, so no update is made before all have arrived. With
    "previous" it uses the norm of the previous step's gradients: an approximation for which nothing has to wait.
    """

    def __init__(self, max_norm: float, clip: str) -> None:
        if not max_norm > 0:
            raise InvalidArgument(f"max_norm is {max_norm}: it bounds a norm and must be more than 0")
        self._max_norm = float(max_norm)
        self._previous: StepClipping | None = None
        self._uses_previous = clip == "previous"

    @property
    def needs_all(self) -> bool:
        """Whether the next step's scale is only known when all gradients are there."""
        return not self._uses_previous or not (self._previous and self._previous.norms)

    def begin_step(self, param_groups: Sequence[Mapping[str, Any]]) -> StepClipping | None:
        """How the step that is called now is clipped. None: its gradients have been clipped already."""
        params = [param for group in param_groups for param in group["params"]]
        if not self._uses_previous:
            torch.nn.utils.clip_grad_norm_(params, self._max_norm)
            return None
        if self.needs_all:
            norms = [torch.linalg.vector_norm(param.grad) for param in params if param.grad is not None]
        else:
            assert self._previous is not None
            norms = [self._previous.norms[param] for param in params if param in self._previous.norms]
        total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms])) if norms else None
        self._previous = StepClipping(self._max_norm, torch.zeros(()) if total is None else total)
        return self._previous


def make_clipping(max_norm: float | None, clip: str) -> Clipping | None:
    """The clipping that a user asks for; InvalidArgument for what is none."""
    if clip not in CLIPS:
        raise InvalidArgument(f"clip is {clip!r}: known are {' and '.join(CLIPS)}")
    return None if max_norm is None else Clipping(max_norm, clip)
