"""Parameters as a network's initialization makes them, equal on all ranks.

What a step changes of a parameter depends on how large it is. So replays in which servers return parameters begin with
parameters that are as large as real ones.
"""

from __future__ import annotations

from math import prod, sqrt
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from poseidon.gradients.kinds import family_of
from poseidon.models import LayerSpec, ModelTable

_TRANSFORMER_STD = 0.02  # BERT, GPT-2, and the positions of ViT; the others of ViT have about as much
_STOCK = 1 << 20  # numbers; larger weights have them several times


def initial_weight(table: ModelTable, layer: LayerSpec, unscaled: LayerSpec) -> NDArray[np.float32]:
    """A layer's weight. `unscaled` is the layer of the whole network, whose widths say how large its numbers are."""
    if layer.kind == "norm":
        return np.ones(layer.weight_shape, np.float32)
    std = _standard_deviation(family_of(table), unscaled)
    random = np.random.default_rng(crc32(layer.name.encode()))
    count = prod(layer.weight_shape)
    drawn = random.standard_normal(min(count, _STOCK), np.float32) * np.float32(std)
    return np.resize(drawn, count).reshape(layer.weight_shape)


def _standard_deviation(family: str, layer: LayerSpec) -> float:
    """Of torch's defaults (uniform, so a third of the square), or of what the network's authors have chosen."""
    outputs, inputs = layer.weight_shape[0], prod(layer.weight_shape[1:])
    if layer.kind == "conv":
        return sqrt(2 * layer.weight_shape[1] / (outputs * inputs))  # He et al., by what goes out
    if family == "lora":
        return 0.0 if "lora_B" in layer.name else sqrt(1 / (3 * inputs))
    if family == "dlrm":
        return sqrt(1 / (3 * outputs)) if layer.kind == "embedding" else sqrt(2 / (inputs + outputs))
    if family in ("gpt", "vit"):
        return _TRANSFORMER_STD
    return sqrt(1 / (3 * inputs))
