"""Parameters that are read in the backward pass in which the servers update them.

Recomputation (`torch.utils.checkpoint`) repeats a part of the forward pass, and must see the values of then. As a rule
it reads parameters that get their gradients later. But a block may read the weight of a later layer without a gradient
for it (`weight.detach()`), whose update has then come.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from poseidon.errors import PoseidonError
from poseidon.torch.model.parameters import SyncedParameter
from poseidon.torch.tensors.watched import unwatch, watch


class Rereads:
    """The watcher of one optimizer's parameters from the start of each one's update to the end of the backward pass.

    `apart`: updates are received beside the parameters, and copied when backward is over. So it is in the first
    backward pass, and in all others if some parameter was read there. In a model that does not do so the parameters'
    own memory receives, without a copy.
    """

    def __init__(self) -> None:
        self.apart = True
        self._seen = False
        self._watched: list[SyncedParameter] = []

    def watch(self, entry: SyncedParameter) -> None:
        """The update of this parameter has begun."""
        self._watched.append(entry)
        watch(entry.param, self, entry)

    def end(self) -> None:
        """The backward pass is over, and all updates are in place."""
        for entry in self._watched:
            unwatch(entry.param)
        self._watched.clear()
        self.apart = self._seen

    # As a `Watcher`.

    def used(self, entries: Sequence[SyncedParameter]) -> None:
        """Their values are needed now."""
        for entry in entries:
            unwatch(entry.param)
        if torch._C._current_graph_task_id() == -1:  # after a backward that has failed
            return
        self._seen = True
        if not self.apart:
            raise PoseidonError(
                f"parameter {entries[0].name} was read in a backward pass, by a recomputation or a hook, after the "
                "servers had updated it, and the first backward pass did not do so: read it with its gradient, or pass "
                "update='worker' to DistributedOptimizer"
            )

    def taken(self, entry: SyncedParameter) -> None:
        """Someone has taken the parameter out of its module."""
        self._seen = self._seen or torch._C._current_graph_task_id() != -1

    def release(self, entry: SyncedParameter) -> None:
        """Nobody else has it watched."""
        unwatch(entry.param)

    def gradient_wanted(self, entry: SyncedParameter) -> None:
        """`.grad` is about to be read, which needs no care."""

    def gradient_replaced(self, entry: SyncedParameter) -> None:
        """`.grad` has been set, which needs no care."""
