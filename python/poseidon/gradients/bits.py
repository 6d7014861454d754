"""How many bits a value of a layer's gradient takes when it is coded, by the sample."""

from __future__ import annotations

from functools import cache
from statistics import mean

import numpy as np

from poseidon.gradients.coded_bits import BLOCK, Format, coded_bits
from poseidon.gradients.exponents import LIKE, exponents, index
from poseidon.gradients.fill import with_exponents
from poseidon.gradients.kinds import family_of, kind_of
from poseidon.models import LayerSpec, ModelTable
from poseidon.models.table import distinct_rows

_ZERO_BLOCK_BITS = 8  # at most


def gradient_bits(
    table: ModelTable, layer: LayerSpec, form: Format, workers: int = 1, rows_only: bool = False
) -> float:
    """Bits a value of a weight's gradient, as `form`.

    `workers`: whose gradients are added up; 1: one worker's. `rows_only`: of an embedding only rows with a gradient
    travel.
    """
    family, kind = family_of(table), kind_of(table, layer)
    if kind != "embedding":
        return _measured(family, kind, form, workers)
    row = _measured(family, "mlp", form, workers)
    rows, width = layer.weight_shape
    if rows_only or any(other.shares == layer.name for other in table.layers):
        return row
    share = distinct_rows(rows, workers * table.batch * layer.positions, layer.row_exponent) / rows
    touched = 1 - (1 - share) ** max(1.0, BLOCK / width)  # of the blocks
    return touched * row + (1 - touched) * _ZERO_BLOCK_BITS / BLOCK


def vector_bits(table: ModelTable, form: Format, workers: int = 1) -> float:
    """The same of biases and norms."""
    return _measured(family_of(table), "vector", form, workers)


def factor_bits(table: ModelTable, layer: LayerSpec, form: Format) -> float:
    """Bits a value of a fully connected layer's factors, as `form`."""
    family, kind = family_of(table), "head" if kind_of(table, layer) == "head" else "fc"
    return _of_factors(family, kind, form)


@cache
def _of_factors(family: str, kind: str, form: Format) -> float:
    random, step = np.random.default_rng(0), index()["steps"][-1]
    pieces = [with_exponents(exponents(family, f"{kind}.{side}", step), random) for side in ("rows", "outputs")]
    return sum(coded_bits(piece, form) for piece in pieces) / sum(piece.size for piece in pieces)


@cache
def _measured(family: str, kind: str, form: Format, workers: int) -> float:
    """The mean of the later steps, of whole gradients."""
    found = [index()["bits"].get(f"{family}/{kind}/{step}") for step in index()["steps"][1:]]
    name = form if workers == 1 else f"mean {form}"
    # A kind that the family does not have is taken from the family most like it.
    return mean(one[name] for one in found) if all(found) else _measured(LIKE[family], kind, form, workers)
