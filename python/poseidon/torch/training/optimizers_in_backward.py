"""Optimizers that torch's `_apply_optimizer_in_backward` has given to parameters.

By themselves they would update with this rank's own gradient as soon as it exists. In a job they run when the exchange
is over.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from poseidon.errors import InvalidArgument
from poseidon.torch.model.parameters import SyncedParameter


class OptimizersInBackward:
    """Takes these optimizers' hooks away and makes their steps itself. Without any it does nothing."""

    def __init__(self, entries: Sequence[SyncedParameter]) -> None:
        self._params = [entry.param for entry in entries if hasattr(entry.param, "_in_backward_optimizers")]
        if not self._params:
            return
        taken = next((entry.name for entry in entries if entry.updater is not None or entry.on_servers), None)
        if taken is not None:
            raise InvalidArgument(
                f"parameter {taken} has a DistributedOptimizer, and others have an optimizer that runs in backward "
                "(_apply_optimizer_in_backward): use one of the two for the model"
            )
        from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

        for param in self._params:
            for handle in param_to_optim_hook_handle_map.get(param, []):
                handle.remove()

    def step(self) -> None:
        """Updates the parameters, whose gradients are now the mean over the ranks; as torch does, clears those."""
        for param in self._params:
            if param.grad is None:
                continue
            with torch.no_grad():
                for optimizer in param._in_backward_optimizers:  # type: ignore[attr-defined]
                    optimizer.step()
            param.grad = None
