"""What a layer's exchange costs under a scheme, by the schemes' closed forms (Poseidon Table 1)."""

from __future__ import annotations

import math

from poseidon import _core
from poseidon.adapter.layer import SyncedLayer
from poseidon.schemes import SCHEMES, is_lossy, takes_factors, takes_rows

_UNBOUNDED = 2**32 - 1  # the core's K of a gradient that is no sum of factors


def mean_factor_count(total: int, worker_count: int) -> int | None:
    """The mean K over the workers, from the sum that an exchange has found. None if the gradient has no factors."""
    return math.ceil(total / worker_count) if 0 < total < _UNBOUNDED else None


def numbers(layer: SyncedLayer, scheme: str, factor_count: int | None, cluster: _core.Cluster) -> float:
    """The numbers that the busiest node sends plus receives in one step."""
    return _core.layer_cost(layer.asked, scheme, factor_count or 0, cluster).busiest(cluster)


def exchanged_bytes(layer: SyncedLayer, scheme: str, factor_count: int | None, cluster: _core.Cluster) -> float:
    """The bytes that the busiest node sends plus receives in one step, without headers."""
    by_parts = takes_factors(scheme) or takes_rows(scheme)
    value_bytes = layer.terms.bytes_per_factor if by_parts else layer.terms.bytes_per_value
    return numbers(layer, scheme, factor_count, cluster) * value_bytes


def carried_bytes(layer: SyncedLayer, scheme: str, factor_count: int | None, cluster: _core.Cluster) -> float:
    """The bytes of these that its port carries in the busier direction: half of them, because both directions run at
    once; or all, if one direction follows the other."""
    one_way = SCHEMES[scheme].one_way_at_a_time and cluster.placement == "dedicated"
    return exchanged_bytes(layer, scheme, factor_count, cluster) / (1 if one_way else 2)


def known_scheme(scheme: str, factor_count: int | None) -> str:
    """The scheme by which a plan counts bytes: without a factor count a gradient goes whole."""
    return scheme if scheme == "ps" or is_lossy(scheme) or factor_count is not None else "ps"


def dense_bytes(layer: SyncedLayer, factor_count: int | None, cluster: _core.Cluster) -> float:
    """The bytes that the busiest node would send plus receive with the parameter server, with numbers as they are."""
    return numbers(layer, "ps", factor_count, cluster) * element_bytes(layer)


def element_bytes(layer: SyncedLayer) -> float:
    """The bytes of an element of what is exchanged, as it is, by the core's sizes. 0 if there is none."""
    return layer.element_count and layer.asked.size_bytes / layer.element_count


def multiply_adds(layer: SyncedLayer, scheme: str, factor_count: int | None, cluster: _core.Cluster) -> float:
    """The multiply-adds of the busiest process from the arrival of the last part to the result."""
    return _core.scheme_multiply_adds(scheme, *_shape(layer), factor_count or 0, cluster)


def _shape(layer: SyncedLayer) -> tuple[int, int]:
    if layer.factorable or layer.row_gradient:
        return layer.shape[0], layer.shape[1]
    return layer.element_count, 1
