"""Updates on the worker that need all gradients: the optimizer's whole step(), once they are there.

This is the path of optimizers that are not known to update each parameter on its own. They may skip a step, look at all
gradients, keep what they have counted, call their closure twice, or communicate. All that is as without Poseidon's
optimizer: the end of backward waits for the exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from poseidon.torch.model.parameters import SyncedParameter
from poseidon.torch.optimizer.clipping import Clipping
from poseidon.torch.optimizer.partial_step import whole_step
from poseidon.torch.optimizer.succession import Tenure
from poseidon.torch.optimizer.wrapper import loss_of


class WholeStep:
    """The updates of one optimizer. Used from the thread that trains."""

    exclusive = False

    def __init__(self, optimizer: Optimizer, clipping: Clipping | None, tenure: Tenure) -> None:
        self.tenure = tenure
        self.entries: list[SyncedParameter] = []
        self._optimizer = optimizer
        self._clipping = clipping

    def take(self, entries: Sequence[SyncedParameter]) -> None:
        """InvalidArgument for a parameter that it cannot clip."""
        self.tenure.note_sparse(entries)
        self.entries += entries

    def end(self, kept: Collection[SyncedParameter]) -> None:
        """See `Update`."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The optimizer's step(), with what it returns."""
        if self._clipping is None:
            return whole_step(self._optimizer, *(() if closure is None else (closure,)))
        loss = loss_of(closure)  # gradients can be clipped only once they are there
        with torch.no_grad():
            clipping = self._clipping.begin_step(self._optimizer.param_groups)
            if clipping is not None:
                params = [param for group in self._optimizer.param_groups for param in group["params"]]
                clipping.clip([param for param in params if param.grad is not None])
        whole_step(self._optimizer)
        return loss
