"""Bytes that one worker moves per step, by closed form: an oracle for what the core plans.

They count bytes sent plus received by one machine that is worker and server at once (colocated shards),
payload only, averaged over the machines.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from poseidon.bench.hosts.measures import FLOAT_BYTES
from poseidon.models import LayerSpec, ModelTable

# Bytes of a value. A block of int8 has 256 values and their scale (docs/wire-formats.md).
WIRE_BYTES = {"fp32": float(FLOAT_BYTES), "bf16": 2.0, "fp16": 2.0, "int8": 260 / 256}


@dataclass(frozen=True)
class Format:
    """How numbers travel: the option `wire`, and the option `small_bytes`, below which tensors travel in groups."""

    wire: str = "fp32"
    small_bytes: int = 0

    def grouped(self, element_count: int) -> bool:
        """Whether a tensor travels in a group."""
        return element_count * FLOAT_BYTES <= self.small_bytes

    def dense_bytes(self, element_count: int) -> float:
        """The bytes of a value of a dense gradient of `element_count` values."""
        return self.shared_scale_bytes if self.grouped(element_count) else WIRE_BYTES[self.wire]

    @property
    def shared_scale_bytes(self) -> float:
        """The bytes of a value where int8 would be too coarse: in groups and in factors."""
        return WIRE_BYTES["bf16" if self.wire == "int8" else self.wire]


_AS_IT_IS = Format()


def ps_floats(element_count: int, worker_count: int) -> float:
    """Sharded parameter server: 4·MN·(P − 1)/P (Poseidon Table 1 with P₁ = P₂ = P). Ring all-reduce moves the same."""
    return 4 * element_count * (worker_count - 1) / worker_count


def sfb_floats(rows: int, cols: int, factor_count: int, worker_count: int) -> float:
    """Sufficient-factor broadcasting: 2·K·(P − 1)(M + N) (Poseidon Table 1)."""
    return 2 * factor_count * (worker_count - 1) * (rows + cols)


def sharded_floats(rows: int, cols: int, factor_count: int, worker_count: int) -> float:
    """Sharded factors: 2·(P − 1)·(K·max(M, N)/P + K·min(M, N) + MN/P)."""
    pushed = factor_count * (max(rows, cols) / worker_count + min(rows, cols))
    return 2 * (worker_count - 1) * (pushed + rows * cols / worker_count)


def adam_floats(rows: int, cols: int, factor_count: int, worker_count: int) -> float:
    """Project Adam's strategy: of P machines one moves (P − 1)(MN + KM + KN) (Poseidon Table 1), and so do the other
    P − 1 together.
    """
    return 2 * (worker_count - 1) * (rows * cols + factor_count * (rows + cols)) / worker_count


_AUTOMATIC = {"sfb": sfb_floats, "sharded_factors": sharded_floats}
_ASKED = ("auto", "ps", "sfb", "project_adam")


def layer_scheme(layer: LayerSpec, factor_count: int, worker_count: int, scheme: str, form: Format = _AS_IT_IS) -> str:
    """The scheme of a layer's weight when `scheme` ("auto", "ps", "sfb", "project_adam") is asked for.

    "auto" is Algorithm 1 with `sharded_factors`, for weights outside groups. Factors are asked for only where a
    worker's are smaller than the dense gradient. ValueError for a scheme whose bytes are not known here.
    """
    if scheme not in _ASKED:
        raise ValueError(f"the closed forms know no bytes of scheme {scheme!r}, only of {', '.join(_ASKED)}")
    if not layer.factorable or scheme == "ps":
        return "ps"
    rows, cols = layer.weight_shape
    grouped = form.grouped(rows * cols)
    if scheme == "project_adam" or (scheme == "sfb" and not grouped):
        return scheme if factor_count * (rows + cols) <= rows * cols else "ps"
    if grouped:
        return "ps"
    floats = {name: count(rows, cols, factor_count, worker_count) for name, count in _AUTOMATIC.items()}
    cheapest = min(floats, key=floats.__getitem__)  # the first of several
    dense = ps_floats(rows * cols, worker_count) * form.dense_bytes(rows * cols)
    return cheapest if floats[cheapest] * form.shared_scale_bytes <= dense else "ps"


def layer_bytes(layer: LayerSpec, factor_count: int, worker_count: int, scheme: str, form: Format = _AS_IT_IS) -> float:
    """Returns what one worker sends plus receives of a layer in one step.

    Biases and norms always go through the parameter server.
    """
    chosen = layer_scheme(layer, factor_count, worker_count, scheme, form)
    dense = dict(layer.tensors)
    factors = 0.0
    if chosen != "ps":
        rows, cols = layer.weight_shape
        weight_floats = {**_AUTOMATIC, "project_adam": adam_floats}[chosen]
        factors = weight_floats(rows, cols, factor_count, worker_count) * form.shared_scale_bytes
        del dense["weight"]
    return factors + sum(ps_floats(count, worker_count) * form.dense_bytes(count) for count in dense.values())


def powersgd_bytes(layer: LayerSpec, worker_count: int, rank: int, small_bytes: int = 0) -> float:
    """Returns what one worker sends plus receives of a layer with PowerSGD in one step.

    A tensor above `small_bytes` goes as two factors of `rank` where these have less than half of its elements.
    """
    floats = layer.parameter_count
    if layer.weight_count and not Format(small_bytes=small_bytes).grouped(layer.weight_count):
        rows, cols = layer.weight_shape[0], prod(layer.weight_shape[1:])
        compressed = (rows + cols) * min(rank, rows, cols)
        if 2 * compressed < rows * cols:
            floats += compressed - rows * cols
    return ps_floats(floats, worker_count) * FLOAT_BYTES


def bytes_per_worker(table: ModelTable, worker_count: int, scheme: str, form: Format = _AS_IT_IS) -> float:
    """Returns what one worker sends plus receives in one step."""
    return sum(layer_bytes(layer, table.factor_count(layer), worker_count, scheme, form) for layer in table.layers)
