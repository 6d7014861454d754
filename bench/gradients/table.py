"""Prints the tables of docs/gradients.md: bits a value that lossless coding leaves of real and of replayed gradients.

The bits of the sampled networks were measured on whole gradients when the sample was made. Those of the tables' models
are those of replayed gradients. Both come from `coded_bits`, which another coder may replace here.

    python bench/gradients/table.py
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from poseidon import _core
from poseidon.gradients.coded_bits import BLOCK, FORMATS, Format, coded_bits
from poseidon.gradients.exponents import index
from poseidon.gradients.layers import LayerGradients
from poseidon.models import model_table, scaled

MODELS = ("VGG19", "ResNet-50", "ViT-B/16", "BERT-base", "GPT-2", "Llama-134M", "Llama-1B LoRA", "DLRM")
REPLAYED_FORMATS: tuple[Format | Literal["int8"], ...] = (*FORMATS, "int8")
NAMES = {"cnn": "CNN", "resnet": "ResNet", "vit": "ViT", "gpt": "GPT", "lora": "LoRA", "dlrm": "DLRM"}
KINDS = {"lora_a": "LoRA, A", "lora_b": "LoRA, B", "vector": "biases and norms", "fc": "fully connected"}
KINDS |= {"conv": "convolution", "mlp": "perceptron"}


def sampled_rows() -> Iterator[tuple[str, ...]]:
    """A row for each family, kind and step: formats of one worker, of the mean, and how many values are zeros."""
    for key, bits in index()["bits"].items():
        family, kind, step = key.split("/")
        figures = [bits[name] for name in (*FORMATS, *(f"mean {form}" for form in FORMATS))]
        name = KINDS.get(kind, kind)
        yield (NAMES[family], name, step, *(f"{figure:.1f}" for figure in figures), f"{100 * bits['zeros']:.0f} %")


def replayed_rows(scale: int, workers: int) -> Iterator[tuple[str, ...]]:
    """A row for each of `MODELS`: the gradients of a step in each format, of one worker and of the mean."""
    for name in MODELS:
        whole = model_table(name)
        ranks = [Replayed(name, scale, rank) for rank in range(workers)]
        steps = [rank.step() for rank in ranks]
        mean = [np.asarray(np.mean(parts, axis=0, dtype=np.float32)) for parts in zip(*steps, strict=True)]
        figures = [_bits_a_value(part, form) for part in (steps[0], mean) for form in REPLAYED_FORMATS]
        yield (whole.name, *(f"{figure:.1f}" for figure in figures))


class Replayed:
    """One rank's gradients of a scaled model: those of all weights and biases that it owns."""

    def __init__(self, name: str, scale: int, rank: int) -> None:
        whole = model_table(name)
        self._table = scaled(whole, scale)
        self._gradients = LayerGradients(self._table, rank, whole)

    def step(self) -> list[NDArray[np.float32]]:
        """The gradients of the next step, in the order of the backward pass. Layers that share a weight add up."""
        found: dict[str, NDArray[np.float32]] = {}
        for layer in reversed(self._table.layers):
            if self._table.factors_pay(layer):
                rows, outputs = self._gradients.factors(layer)
                weight = outputs.T @ rows
            else:
                weight = self._gradients.weight(layer)
            owner = layer.shares or layer.name
            found[owner] = found[owner] + weight if owner in found else weight
            if layer.bias:
                found[f"{layer.name}.bias"] = self._gradients.bias(layer)
        return list(found.values())


def _bits_a_value(gradients: list[NDArray[np.float32]], form: Format | Literal["int8"]) -> float:
    """Of a step's gradients. Blocks of int8 have 8.125 as they are (docs/wire-formats.md)."""
    if form == "int8":
        bits = sum(8 * _core.coded_bytes(_int8_blocks(values.reshape(-1)), "int8_blocks") for values in gradients)
    else:
        largest = max(float(np.abs(values).max()) for values in gradients)
        factor = np.float32(2.0 ** np.floor(np.log2(2.0**14 / largest)) if form == "fp16" else 1)
        bits = sum(coded_bits(values * factor, form) for values in gradients)
    return bits / sum(values.size for values in gradients)


def _int8_blocks(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    parts = np.pad(values, (0, -values.size % BLOCK)).reshape(-1, BLOCK)
    scales = np.abs(parts).max(axis=1) / np.float32(127)
    blocks = np.empty(len(parts), [("scale", np.float32), ("bytes", np.int8, BLOCK)])
    blocks["scale"] = scales
    blocks["bytes"] = np.rint(parts / np.where(scales > 0, scales, 1)[:, None])
    return blocks.view(np.uint8)


def _print(header: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> None:
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=int, default=8, help="of the replayed models")
    parser.add_argument("--workers", type=int, default=8, help="whose replayed gradients are averaged")
    args = parser.parse_args()
    formats = (*FORMATS, *(f"mean, {form}" for form in FORMATS))
    _print(("network", "kind", "step", *formats, "zeros"), sampled_rows())
    print()
    formats = (*REPLAYED_FORMATS, *(f"mean, {form}" for form in REPLAYED_FORMATS))
    _print(("model", *formats), replayed_rows(args.scale, args.workers))


if __name__ == "__main__":
    main()
