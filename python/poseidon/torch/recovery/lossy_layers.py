"""What lossy schemes have not sent yet, as a part of the state of a training step. It belongs to a rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from poseidon.adapter.arrays import Bytes
from poseidon.adapter.layer import SyncedLayer
from poseidon.adapter.layer_table import Residual
from poseidon.adapter.snapshots import tell
from poseidon.torch.ddp import DistributedDataParallel
from poseidon.torch.exchange.synchronizer import Synchronizer

_KEPT_STEPS = 2  # that of an attempt, and the one before, whose updates may wait for their gradients

Residuals = list[dict[SyncedLayer, Residual]]
"""By model; layers of which all is sent are left out."""


class LossyLayers:
    """The residuals of all models' layers with lossy schemes, at the beginnings of the last steps.

    A step that all ranks have completed has this rank's part of every layer. So after a failure the residuals of the
    failed attempt are those of the beginning of the next step, if the others have completed it.
    """

    def __init__(self, models: Sequence[DistributedDataParallel]) -> None:
        self._models = models
        self._beginnings: dict[int, Residuals] = {}
        self._attempt = -1
        self._gone: list[str] = []  # layers whose residual the failure of the attempt has taken
        self._next: Residuals | None = None  # those with which `resume` goes on

    def refuse_servers(self) -> None:
        """InvalidArgument, naming a layer that may take a lossy scheme beside layers on servers, if there is one."""
        for model in self._models:
            for entry in model.synced_parameters:
                if entry.asked.may_lose:
                    model.trained_model().features.check("server_residuals", entry.name)

    def begin(self, step: int) -> None:
        """An attempt at this step begins. Waits for exchanges of lossy layers in flight."""
        if not self._layers():
            return
        residuals = [sync.layers.residuals() for sync in synchronizers_of(self._models)]
        kept = {number: kept for number, kept in self._beginnings.items() if step - _KEPT_STEPS < number < step}
        self._beginnings = kept | {step: residuals}
        self._attempt = step

    def note_failure(self) -> None:
        """The attempt has failed, and with it the client, which has not ended."""
        if self._attempt < 0:
            return
        after = [sync.layers.residuals(after_failure=True) for sync in synchronizers_of(self._models)]
        self._beginnings[self._attempt + 1] = after
        before = self._beginnings.get(self._attempt, [{} for _ in after])
        self._gone = [layer.name for old, new in zip(before, after, strict=True) for layer in old if layer not in new]

    def go_back(self, step: int) -> None:
        """Training goes on from the beginning of this step."""
        self._next = self._beginnings.get(step)
        if step == self._attempt + 1 and self._gone:
            tell(
                f"this rank begins step {step} without the residual of {', '.join(self._gone)}: it failed before their "
                "exchange had ended, and others have the result"
            )

    def take(self, data: Bytes | None) -> None:
        """Training goes on with residuals that `residuals` returned on this rank. None: these are lost."""
        size = sum(layer.kept_count for layer in self._layers())
        if data is None or data.size != size * np.dtype(np.float32).itemsize:
            self._next = None
            return
        values, self._next = data.view(np.float32), []
        for sync in synchronizers_of(self._models):
            found = {}
            for layer in _lossy(sync):
                found[layer], values = values[: layer.kept_count].copy(), values[layer.kept_count :]
            self._next.append(found)

    def resume(self, step: int) -> None:
        """Training goes on with this step, in a client without residuals."""
        if not self._layers():
            return
        residuals, self._next = self._next, None
        self._beginnings = {}
        if residuals is None:
            if step > 0:
                tell(
                    f"this rank begins step {step} without residuals: what lossy schemes or wire formats of it had not "
                    "sent is lost"
                )
            return
        for sync, found in zip(synchronizers_of(self._models), residuals, strict=True):
            sync.layers.load_residuals(found)

    def residuals(self) -> Bytes | None:
        """All residuals one after the other, of one size on all ranks; None without layers of lossy schemes."""
        layers = self._layers()
        if not layers:
            return None
        parts = []
        for sync in synchronizers_of(self._models):
            found = sync.layers.residuals()
            parts += [found.get(layer, np.zeros(layer.kept_count, np.float32)) for layer in _lossy(sync)]
        return np.concatenate(parts).view(np.uint8)

    def _layers(self) -> list[SyncedLayer]:
        return [layer for sync in synchronizers_of(self._models) for layer in _lossy(sync)]


def synchronizers_of(models: Sequence[DistributedDataParallel]) -> list[Synchronizer]:
    """What exchanges these models' gradients; with one worker nothing does."""
    return [sync for model in models if (sync := model.synchronizer) is not None]


def _lossy(sync: Synchronizer) -> list[SyncedLayer]:
    return [layer for layer in sync.entries if layer.kept_count]
