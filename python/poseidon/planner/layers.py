"""The parameters of a table as an adapter adds them to a client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from poseidon.adapter.layer import SyncedLayer
from poseidon.adapter.layer_rules import LayerFacts, LayerRules, LayerWishes
from poseidon.adapter.priorities import ordered_places
from poseidon.models import LayerSpec, ModelTable, ParameterSpec
from poseidon.options import BY_NAME
from poseidon.schemes import takes_factors

PRIORITY_CLASSES = 2
_SIZES = ("small_bytes", "group_bytes", "chunk_bytes")
EXCHANGE_OPTIONS = (
    *("priority_threshold", "priority_order", "priority_classes"),
    *("partition", "schedule", "revise"),
    *_SIZES,
    "coding",
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
    `powersgd_rank` and `coding`: the options of these names. `coded_share`: what travels of each byte that is coded;
    None: as the sample of real gradients says (docs/gradients.md).
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
    powersgd_rank: int = 4
    coding: str = "off"
    coded_share: float | None = None

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
            coding=options.get("coding", "off"),
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
    rules = LayerRules(small_bytes=exchange.small_bytes)
    found = [
        planned
        for place, spec in enumerate(table.layers)
        for planned in _of_layer(table, place, spec, exchange, rules, shared)
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
    table: ModelTable, place: int, spec: LayerSpec, exchange: Exchange, rules: LayerRules, shared: set[str]
) -> Iterator[PlannedLayer]:
    if spec.parameters is None:
        for tensor in spec.tensors:
            yield _assumed(table, place, tensor, exchange, rules, spec.name in shared)
        return
    for one in spec.parameters:
        yield PlannedLayer(_seen(one, exchange, rules), place, one.factor_count, one.presence, one.place)


def _assumed(
    table: ModelTable, place: int, tensor: str, exchange: Exchange, rules: LayerRules, shared: bool
) -> PlannedLayer:
    """A parameter of a layer of which only the shape is known. `shared`: others use its weight, too."""
    spec = table.layers[place]
    weight, count = tensor == "weight", spec.tensors[tensor]
    connected = spec.kind == "fc" and (not exchange.replayed or table.factors_pay(spec))
    factorable = weight and spec.factorable and connected
    rows = weight and spec.kind == "embedding" and not shared and not exchange.replayed
    shape = spec.weight_shape if weight else (count,)
    facts = LayerFacts(
        spec.name if spec.is_parameter else f"{spec.name}.{tensor}",
        "float32",
        count,
        shape[0] if len(shape) > 1 else 0,
        factorable,
        "zeros" if rows else "",
    )
    # A scheme that takes factors is wished for what has them.
    scheme = exchange.scheme if factorable or not takes_factors(exchange.scheme) else "auto"
    layer = SyncedLayer(
        facts, LayerWishes(scheme, exchange.wire, powersgd_rank=exchange.powersgd_rank), rules, shape, connected
    )
    known = round(table.rows_touched(spec)) if rows else table.factor_count(spec) if factorable else 0
    return PlannedLayer(layer, place, known, 1.0, 0)


def _seen(one: ParameterSpec, exchange: Exchange, rules: LayerRules) -> SyncedLayer:
    """A parameter of a real model."""
    shape, gives_rows = one.shape, "zeros" if one.rows == "touched" else one.rows
    rows = shape[0] if len(shape) > 1 else 0
    facts = LayerFacts(one.name, one.dtype, one.count, rows, one.factorable, gives_rows)
    return SyncedLayer(
        facts, LayerWishes(exchange.scheme, exchange.wire, wire_if_float=True), rules, shape, one.fully_connected
    )
