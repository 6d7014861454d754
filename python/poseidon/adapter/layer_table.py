"""The layers of one model in the client, and the schemes on which the ranks agree before each exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from poseidon import _core
from poseidon.adapter.control import Control
from poseidon.adapter.layer import SyncedLayer

Residual = NDArray[np.float32]
"""What a lossy scheme has not sent of one layer yet, in one dimension."""


class LayerTable:
    """All layers of a model, in the order in which backward finishes them. Use it from the thread that trains."""

    _client: _core.Client
    _control: Control

    def __init__(self, layers: Sequence[SyncedLayer]) -> None:
        self._layers = layers
        self._factorable: list[SyncedLayer] = []
        self._counted: list[SyncedLayer] = []  # these, and those that may travel as rows
        self._agreed = False

    def settle(self, control: Control, cluster: _core.Cluster) -> None:
        """Collective: chooses what "auto" is, for good, because a compiled training step cannot change it.

        A layer takes factors only if all ranks have them, and know how many from the shapes in their programs.
        """
        rows = control.one_hot([layer.forward_rows if layer.factorable else -1 for layer in self._layers])
        for layer, counts in zip(self._layers, zip(*rows, strict=True), strict=True):
            layer.settle(counts, cluster)

    def share_factors(self, control: Control) -> None:
        """Collective: layers that have no factors on some rank have them on none, because all ranks plan alike."""
        counts = control.sum([int(layer.factorable) for layer in self._layers])
        for layer, count in zip(self._layers, counts, strict=True):
            if count < control.world_size:
                layer.give_no_factors()

    def connect(self, client: _core.Client, control: Control) -> None:
        """Adds all layers to `client`. Collective."""
        self._client, self._control, self._agreed = client, control, False
        self.add(self._layers)

    def add(self, layers: Sequence[SyncedLayer]) -> None:
        """Adds these layers. Collective."""
        asked = [layer.asked for layer in layers]
        first, plan = self._client.add_layers(asked)
        units = plan.units  # each look at the plan copies the whole list
        found = zip(layers, plan.unit_of_layer, plan.terms, strict=True)
        for number, (layer, unit, terms) in enumerate(found, first):
            shard_bytes = self._shard_bytes(plan, units[unit]) if layer.on_servers else 0
            layer.place(number, (first, unit), terms, shard_bytes)
        self._factorable = [layer for layer in self._layers if layer.terms.uses_factors]
        self._counted = [layer for layer in self._layers if layer.counted]

    def renew(self, layers: Sequence[SyncedLayer]) -> None:
        """Adds these layers again, because they or others have changed. Their residuals stay. Collective."""
        residuals = self.residuals()
        self.add(layers)
        self.set_residuals(residuals)

    def residuals(self) -> dict[SyncedLayer, Residual]:
        """Copies of what lossy schemes have not sent of each layer yet. Layers of which all is sent are left out."""
        found = {}
        for layer in self._layers:
            if layer.kept_count and (data := self._client.residual(layer.layer)) is not None:
                found[layer] = data.view(np.float32).copy()
        return found

    def set_residuals(self, residuals: Mapping[SyncedLayer, Residual]) -> None:
        """Makes these the residuals of lossy layers. The other ones have none."""
        for layer in self._layers:
            if layer.kept_count:
                self._client.set_residual(layer.layer, residuals.get(layer))

    def _shard_bytes(self, plan: _core.Plan, unit: _core.Unit) -> int:
        if plan.cluster.placement != "colocated":
            return 0
        return sum(chunk.size_bytes for chunk in unit.chunks if chunk.server == self._client.rank)

    def begin_attempt(self) -> None:
        """Begins an attempt: forgets the rows that forward has counted before."""
        for layer in self._factorable:
            layer.forget_forward_rows()

    def resume(self, attempt: int) -> None:
        """Makes the next exchanges take the schemes that they would take without a failure. Call it after `connect`."""
        sums = [(layer, layer.factor_sum_before(attempt)) for layer in self._counted]
        known = [(layer, factor_sum) for layer, factor_sum in sums if factor_sum is not None]
        if len(known) < len(sums):
            return
        for layer, factor_sum in known:
            self._client.set_factor_count(layer.layer, factor_sum)
        self._agreed = True

    def agree(self) -> None:
        """Sets every layer's `next_scheme` to that of the exchange that begins. Collective at the first exchange."""
        if not self._agreed:
            self._agreed = True
            if self._factorable:
                rows = self._control.sum([layer.forward_rows for layer in self._factorable])
                for layer, count in zip(self._factorable, rows, strict=True):
                    self._client.set_factor_count(layer.layer, count)
        for layer in self._counted:
            layer.take_next_scheme(self._client)
