"""The parameters of a table as an adapter adds them to a client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from poseidon.adapter.layer import SyncedLayer
from poseidon.adapter.priorities import ordered_places
from poseidon.models import LayerSpec, ModelTable, ParameterSpec
from poseidon.options import BY_NAME
from poseidon.schemes import takes_factors, takes_rows

PRIORITY_CLASSES = 2
_SIZES = ("small_bytes", "group_bytes", "chunk_bytes")
EXCHANGE_OPTIONS = (
    *("priority_threshold", "priority_order", "priority_classes"),
    *("partition", "schedule", "revise"),
    *_SIZES,
)
"""What an exchange depends on, beside the scheme, the wire format and the optimizer."""


class _DistributedOptimizer:
    """Stands for the one that updates the parameters."""


_UPDATER = _DistributedOptimizer()


@dataclass(frozen=True)
class Exchange:
    """How gradients are exchanged. `scheme`, `wire`, `partition` and `schedule` are Poseidon's options of these names,
    `threshold`, `order` and `classes` those that begin with `priority_`.

    `overlap`: a DistributedOptimizer lets the next forward pass wait layer by layer. `by_time`: layers may take another
    scheme than the one with the fewest bytes if the step is faster then (option `revise`). `sizes` has those of
    `chunk_bytes`, `small_bytes` and `group_bytes` that are not their defaults. `replayed`: as `poseidon bench train`
    replays a network: embeddings are dense, and so are layers whose factors would be larger than their gradients.
    """

    scheme: str = "auto"
    wire: str = "fp32"
    overlap: bool = False
    threshold: str | float = "auto"
    order: str = "urgency"
    classes: int = PRIORITY_CLASSES
    partition: str = "balanced"
    schedule: str = "wait_free"
    by_time: bool = True
    sizes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    replayed: bool = False

    @classmethod
    def of_options(cls, options: Mapping[str, Any], scheme: str, wire: str, overlap: bool) -> Exchange:
        """The exchange with these values of Poseidon's options, `EXCHANGE_OPTIONS`."""
        threshold = options["priority_threshold"]
        return cls(
            scheme,
            wire,
            overlap,
            threshold if isinstance(threshold, str) else float(threshold),
            options["priority_order"],
            options["priority_classes"] or PRIORITY_CLASSES,
            options["partition"],
            options["schedule"],
            options["revise"] == "auto",
            {name: options[name] for name in _SIZES if isinstance(options[name], int)},
        )

    @property
    def small_bytes(self) -> int:
        """Layers of at most so many bytes travel with others."""
        return self.sizes.get("small_bytes", BY_NAME["small_bytes"].default)


@dataclass(frozen=True)
class PlannedLayer:
    """A parameter. `place` is that of its layer in the table. `factor_count`: K of one worker, or its gradient's rows.

    `presence`: the part of the steps in which it has a gradient. `registered`: its place among all parameters.
    """

    layer: SyncedLayer
    place: int
    factor_count: int
    presence: float
    registered: int


def planned_layers(table: ModelTable, exchange: Exchange) -> list[PlannedLayer]:
    """All parameters, in the order in which training hands them to the core: the last one registered is the first."""
    shared = {spec.shares for spec in table.layers}
    found = [
        planned
        for place, spec in enumerate(table.layers)
        for planned in _of_layer(table, place, spec, exchange, shared)
    ]
    ordered = ordered_places(exchange.order, len(found))
    for position, planned in enumerate(found):
        planned.layer.position, planned.layer.urgency = position, 1.0
        if exchange.overlap:
            planned.layer.urgency = 1 - ordered[position] / len(found)
            planned.layer.update_by(_UPDATER)
    found.reverse()  # as backward finishes them, where nothing was registered
    return sorted(found, key=lambda planned: -planned.registered)


def _of_layer(
    table: ModelTable, place: int, spec: LayerSpec, exchange: Exchange, shared: set[str]
) -> Iterator[PlannedLayer]:
    if spec.parameters is None:
        for tensor in spec.tensors:
            yield _assumed(table, place, tensor, exchange, spec.name in shared)
        return
    for one in spec.parameters:
        yield PlannedLayer(_seen(one, exchange), place, one.factor_count, one.presence, one.place)


def _assumed(table: ModelTable, place: int, tensor: str, exchange: Exchange, shared: bool) -> PlannedLayer:
    """A parameter of a layer of which only the shape is known. `shared`: others use its weight, too."""
    spec = table.layers[place]
    weight, count = tensor == "weight", spec.tensors[tensor]
    connected = spec.kind == "fc" and (not exchange.replayed or table.factors_pay(spec))
    factorable = weight and spec.factorable and connected
    rows = weight and spec.kind == "embedding" and not shared and not exchange.replayed
    layer = SyncedLayer(
        spec.name if spec.is_parameter else f"{spec.name}.{tensor}",
        spec.weight_shape if weight else (count,),
        "float32",
        count,
        exchange.scheme if factorable or not takes_factors(exchange.scheme) else "auto",
        exchange.wire,
        factorable=factorable,
        fully_connected=connected,
        row_gradient=rows,
        zeros_are_missing=rows,
    )
    known = round(table.rows_touched(spec)) if rows else table.factor_count(spec) if factorable else 0
    return PlannedLayer(layer, place, known, 1.0, 0)


def _seen(one: ParameterSpec, exchange: Exchange) -> SyncedLayer:
    """A parameter of a real model, with the scheme that the PyTorch adapter asks the core for."""
    scheme = exchange.scheme
    may_be_rows = bool(one.rows) and (scheme == "auto" or takes_rows(scheme))
    rows = may_be_rows and (one.rows == "sparse" or takes_rows(scheme) or one.size_bytes > exchange.small_bytes)
    if not one.factorable and scheme != "auto" and not rows:
        scheme = "ps"
    # A sparse gradient that does not travel as rows is a dense one with a count for each row, and one more.
    counts = one.shape[0] + 1 if one.rows == "sparse" and not rows else 0
    return SyncedLayer(
        one.name,
        one.shape,
        one.dtype,
        one.count + counts,
        scheme,
        exchange.wire if one.dtype == "float32" else "fp32",
        factorable=one.factorable,
        fully_connected=one.fully_connected,
        row_gradient=rows,
        zeros_are_missing=rows and one.rows == "touched",
    )
