"""Bytes that one worker moves per step, by closed form.

They count bytes sent plus received by one machine that is worker and server at once (colocated shards),
payload only, averaged over the machines.
"""

from __future__ import annotations

from poseidon.bench.hosts.measures import FLOAT_BYTES
from poseidon.models import LayerSpec, ModelTable


def ps_floats(element_count: int, worker_count: int) -> float:
    """Sharded parameter server: 4·MN·(P − 1)/P (Poseidon Table 1 with P₁ = P₂ = P). Ring all-reduce moves the same."""
    return 4 * element_count * (worker_count - 1) / worker_count


def sfb_floats(rows: int, cols: int, factor_count: int, worker_count: int) -> float:
    """Sufficient-factor broadcasting: 2·K·(P − 1)(M + N) (Poseidon Table 1)."""
    return 2 * factor_count * (worker_count - 1) * (rows + cols)


def adam_floats(rows: int, cols: int, factor_count: int, worker_count: int) -> float:
    """Project Adam's strategy: of P machines one moves (P − 1)(MN + KM + KN) (Poseidon Table 1), and so do the other
    P − 1 together.
    """
    return 2 * (worker_count - 1) * (rows * cols + factor_count * (rows + cols)) / worker_count


def layer_scheme(layer: LayerSpec, factor_count: int, worker_count: int, scheme: str) -> str:
    """The scheme of a layer's weight when `scheme` ("auto", "ps", "project_adam") is asked for.

    "auto" is Algorithm 1. Adam's strategy pushes factors only where they are smaller than the dense gradient.
    """
    if not layer.factorable or scheme == "ps":
        return "ps"
    rows, cols = layer.weight_shape
    if scheme == "project_adam":
        return "project_adam" if factor_count * (rows + cols) <= rows * cols else "ps"
    factors = sfb_floats(rows, cols, factor_count, worker_count)
    return "sfb" if factors <= ps_floats(rows * cols, worker_count) else "ps"


def bytes_per_worker(table: ModelTable, worker_count: int, scheme: str, element_bytes: int = FLOAT_BYTES) -> float:
    """Returns what one worker sends plus receives in one step.

    Biases and norms always go through the parameter server.
    """
    floats = 0.0
    for layer in table.layers:
        factor_count = table.factor_count(layer)
        chosen = layer_scheme(layer, factor_count, worker_count, scheme)
        if chosen == "ps":
            floats += ps_floats(layer.parameter_count, worker_count)
            continue
        rows, cols = layer.weight_shape
        weight_floats = sfb_floats if chosen == "sfb" else adam_floats
        floats += weight_floats(rows, cols, factor_count, worker_count) + ps_floats(layer.bias_count, worker_count)
    return floats * element_bytes
