"""What a layer may do in a job, as the core decides it (include/poseidon/layer.h)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from poseidon import _core
from poseidon.options import Settings


@dataclass(frozen=True)
class LayerFacts:
    """What is known of a tensor whose gradient is exchanged: the fields of the core's LayerFacts, by their names.

    `gives_rows` is "" if the gradient has all rows, "zeros" if most are zeros, and "sparse" if only a few come.
    """

    name: str
    dtype: str
    element_count: int
    rows: int = 0
    gives_factors: bool = False
    gives_rows: str = ""
    stored: bool = False
    whole: bool = False
    who: str = ""
    dtype_text: str = ""


@dataclass(frozen=True)
class LayerWishes:
    """What the user wishes for a tensor: the fields of the core's LayerWishes, by their names.

    `lossy` is a lossy scheme or a wire format that "auto" may choose; empty: none. `settled` is empty while it is open.
    """

    scheme: str = "auto"
    wire: str = "fp32"
    wire_is_given: bool = True
    wire_if_float: bool = False
    lossy: str = ""
    topk_fraction: float = 0.01
    powersgd_rank: int = 4
    factor_wire: str = ""
    error_feedback: bool = False
    parameter_wire: str = "fp32"
    float32_value: bool = False
    settles: bool = False
    settled: str = ""

    @staticmethod
    def for_all(settings: Settings) -> dict[str, Any]:
        """Those that options alone give, for all layers."""
        return {
            "topk_fraction": settings.topk_fraction,
            "powersgd_rank": settings.powersgd_rank,
            "factor_wire": "" if settings.factor_wire == "wire" else settings.factor_wire,
            "error_feedback": settings.error_feedback == "on",
        }


class LayerRules:
    """The rules of a job with these options of the core, such as `small_bytes`."""

    def __init__(self, **options: Any) -> None:
        self._options = _core.Options(**options)

    @classmethod
    def of(cls, settings: Settings) -> LayerRules:
        """The rules of a job with these settings."""
        return cls(small_bytes=settings.small_bytes, stragglers=settings.stragglers, consistency=settings.consistency)

    def layer(self, facts: LayerFacts, wishes: LayerWishes) -> _core.Layer:
        """The layer that a tensor becomes. InvalidArgument, naming it, if it cannot do what is wished."""
        return _core.wished_layer(facts, wishes, self._options)

    def terms(self, layer: _core.Layer) -> _core.LayerTerms:
        """Its terms among several workers. InvalidArgument if a plan would refuse it."""
        return _core.layer_terms(layer, _core.Cluster(2, 2), self._options)

    def settled_scheme(self, layer: _core.Layer, counts: Sequence[int], cluster: _core.Cluster) -> str:
        """What "auto" is for good, if the ranks have these numbers of factors (K)."""
        found = _core.settled_scheme(layer, counts, cluster, self._options)
        # One that a job has shrunk to is still a member of it, in which nothing has a plan of its own.
        return "ps" if found == "local" else found
