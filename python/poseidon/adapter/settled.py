"""Schemes that are chosen once, for frameworks that compile a training step as a whole."""

from __future__ import annotations

from collections.abc import Sequence

from poseidon import _core
from poseidon.adapter.control import Control
from poseidon.adapter.layer import SyncedLayer
from poseidon.options import Settings


def settle_schemes(layers: Sequence[SyncedLayer], control: Control, cluster: _core.Cluster, settings: Settings) -> None:
    """Collective: chooses what "auto" is, for good, because a compiled training step cannot change it.

    A layer takes factors only if all ranks have them, and know how many from the shapes in their programs.
    """
    rows = control.one_hot([layer.forward_rows if layer.factorable else -1 for layer in layers])
    for layer, counts in zip(layers, zip(*rows, strict=True), strict=True):
        if layer.asked_scheme != "auto":
            continue
        if min(counts) <= 0:
            layer.ask_for("ps")
            continue
        mean_count, large = sum(counts) / len(counts), layer.element_count * 4 > settings.small_bytes
        layer.settle(_core.best_scheme(layer.core_layer(), mean_count, cluster) if large else "ps", mean_count)
