"""The gradients of a table's layers, as one rank of a replay draws them, and the parameters that it begins with."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from poseidon.gradients.fill import LookedUp, Stock, factor
from poseidon.gradients.initial import initial_weight
from poseidon.gradients.kinds import family_of, kind_of
from poseidon.models import LayerSpec, ModelTable

_VECTOR = "vector"


class LayerGradients:
    """Draws gradients anew for each layer, rank and step. All ranks must draw in the same order. One thread at a time.

    The numbers lie in stocks, so a gradient costs what copying it costs.
    """

    def __init__(self, table: ModelTable, rank: int, unscaled: ModelTable | None = None) -> None:
        """`unscaled` is the table of which `table` is a scaled one; None: `table` is whole."""
        self._table, self._rank = table, rank
        self._whole = dict(zip([layer.name for layer in table.layers], (unscaled or table).layers, strict=True))
        self._batch = (unscaled or table).batch
        self._family = family_of(table)
        self._kinds = {layer.name: kind_of(table, layer) for layer in table.layers}
        self._looked_up: dict[str, LookedUp] = {}
        largest: dict[str, int] = defaultdict(int)
        for layer in table.layers:
            if table.factors_pay(layer):
                continue  # its gradient is the product of its factors
            kind, count = self._kinds[layer.name], int(np.prod(layer.weight_shape))
            if layer.kind == "embedding":
                count = self._look_up(layer, count)
            largest[kind] = max(largest[kind], count)
            largest[_VECTOR] = max(largest[_VECTOR], layer.bias_count)
        self._stocks = {kind: Stock(self._family, kind, count, rank) for kind, count in largest.items() if count}

    def weight(self, layer: LayerSpec) -> NDArray[np.float32]:
        """A new gradient of a layer's weight, also of one that is another layer's. Of the weight's shape."""
        stock = self._stocks[self._kinds[layer.name]]
        looked_up = self._looked_up.get(layer.name)
        flat = stock.draw(int(np.prod(layer.weight_shape))) if looked_up is None else looked_up.draw(stock)
        return flat.reshape(layer.weight_shape)

    def bias(self, layer: LayerSpec) -> NDArray[np.float32]:
        """A new gradient of a layer's bias."""
        return self._stocks[_VECTOR].draw(layer.bias_count)

    def factors(self, layer: LayerSpec) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Rows (K × in) that go into a fully connected layer, and the gradients (K × out) that come back."""
        rows, cols = layer.weight_shape
        count = self._table.factor_count(layer)
        kind = "head" if self._kinds[layer.name] == "head" else "fc"
        seed = list(self._whole).index(layer.name)
        inputs = factor(self._family, f"{kind}.rows", (count, cols), self._rank, seed)
        return inputs, factor(self._family, f"{kind}.outputs", (count, rows), self._rank, seed)

    def initial_weight(self, layer: LayerSpec) -> NDArray[np.float32]:
        """The weight that a layer owns, before the first step. Biases are 0 then."""
        return initial_weight(self._table, layer, self._whole[layer.name])

    def _look_up(self, layer: LayerSpec, count: int) -> int:
        """Prepares an embedding. Returns the most values that one batch touches."""
        whole = self._whole[layer.name]
        looked_up = LookedUp(layer.name, whole.weight_shape, self._batch * whole.positions, whole.row_exponent, count)
        self._looked_up[layer.name] = looked_up
        return looked_up.prepare(self._rank)
