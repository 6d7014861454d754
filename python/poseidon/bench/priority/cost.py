"""What scheduling costs a host per chunk (Geryon Figure 10)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from poseidon.errors import InvalidArgument

PAPER_CHUNK_COUNTS = (320, 440, 680)  # of VGG-19 with the paper's three slicing thresholds
CHUNK_COUNTS = (*PAPER_CHUNK_COUNTS, 10_000, 100_000, 1_000_000)
VGG19_TENSOR_COUNT = 38


@dataclass(frozen=True)
class Cost:
    """Seconds that a host spends on all of `chunk_count` chunks, by repeat.

    A chunk's class is looked up, and the chunk goes into the send queue and out again.
    """

    chunk_count: int
    seconds: list[float]

    @property
    def seconds_per_chunk(self) -> float:
        """The time of the median repeat, for one chunk."""
        return median(self.seconds) / self.chunk_count


@dataclass(frozen=True)
class CostResult:
    """A whole run. The chunks belong to `layer_count` layers."""

    layer_count: int
    costs: list[Cost]

    def to_json(self) -> dict[str, Any]:
        """Returns the result as `json.dump` takes it."""
        document = asdict(self)
        for entry, cost in zip(document["costs"], self.costs, strict=True):
            entry["seconds_per_chunk"] = cost.seconds_per_chunk
        return document


def measure_costs(chunk_counts: Sequence[int], layer_count: int, repeat_count: int) -> CostResult:
    """Measures the cost for each number of chunks, spread over `layer_count` layers.

    Raises InvalidArgument for a number below 1.
    """
    if min(chunk_counts, default=0) < 1 or layer_count < 1 or repeat_count < 1:
        raise InvalidArgument("the numbers of chunks, layers and repeats must be at least 1")
    from poseidon._core import scheduling_seconds

    return CostResult(
        layer_count,
        [Cost(count, [scheduling_seconds(count, layer_count) for _ in range(repeat_count)]) for count in chunk_counts],
    )
