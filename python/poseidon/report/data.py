"""The data of a report: plain records that every rank writes as JSON and one process merges.

Nothing here depends on a framework or on the core. Times are nanoseconds of a rank's monotonic clock. Bytes are those
of one step unless a name says otherwise.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

_FIGURES = ("bytes_sent", "dense_bytes", "hidden", "predicted_s", "measured_s")  # of a layer, whose means are shown

#: What a rank does during a span. The first four run on its compute thread, one after the other or nested.
KINDS = ("forward", "backward", "wait", "update", "synchronization")


@dataclass(frozen=True)
class Span:
    """An interval of time on one rank.

    `layer` is empty for intervals of the whole model: the forward and backward pass, the wait for the exchanges that
    backward did not hide, and the optimizer's update.
    """

    kind: str
    step: int
    start_ns: int
    end_ns: int
    layer: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown kind of span {self.kind!r}: take one of {', '.join(KINDS)}")
        if self.end_ns < self.start_ns:
            raise ValueError(f"span {self.kind} {self.layer!r} of step {self.step} ends before it starts")

    @property
    def duration_ns(self) -> int:
        """How long the span lasted, in nanoseconds."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True)
class LayerRow:
    """One line of the per-layer table: a layer, or a group of small ones that is exchanged as one."""

    name: str
    shape: tuple[int, ...]
    factor_count: int  # K of one worker; 0 where the gradient is no sum of outer products
    scheme: str
    bytes_sent: float  # by one worker and its shard, headers included
    dense_bytes: float  # the same if the layer went by PS
    hidden: float | None  # share of the synchronization's time during which backward still computed
    predicted_s: float | None = None  # of the synchronization, by the choice of schemes; None: not predicted
    measured_s: float | None = None  # the median of the recorded steps
    reason: str = ""  # for the scheme

    @property
    def shape_text(self) -> str:
        """The shape for people, such as "64×3×3×3"."""
        return "×".join(str(size) for size in self.shape) if self.shape else "scalar"


@dataclass(frozen=True)
class Epoch:
    """One pass over the training set."""

    number: int
    loss: float  # mean over the reporting rank's examples
    accuracy: float  # on the test set, 0…1
    images_per_s: float  # all workers together
    duration_s: float


@dataclass
class RankRecord:
    """What one rank saw. `origin_ns` is its clock at an instant that all ranks know; it is 0 if they share a clock."""

    rank: int
    host: str
    origin_ns: int
    layers: list[LayerRow] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    bytes_sent: int = 0  # since the start, all that this process sent
    optimizer_bytes: int = 0  # of optimizer state in this process; the next: with an update on every worker
    worker_side_optimizer_bytes: int = 0
    late_steps: int = 0  # that were completed without some of this rank's gradients (stragglers=drop)

    def steps(self) -> list[int]:
        """The recorded steps, in order."""
        return sorted({span.step for span in self.spans})

    @property
    def step_s(self) -> float | None:
        """The median time from the begin of a recorded step to that of the next; None with fewer than two steps."""
        begins = sorted(span.start_ns for span in self.spans if span.kind == "forward" and not span.layer)
        times = [later - earlier for earlier, later in pairwise(begins)]
        return statistics.median(times) / 1e9 if times else None


@dataclass
class Report:
    """Everything on the page. `environment` holds names and values as they are shown."""

    title: str
    subtitle: str
    environment: list[tuple[str, str]]
    epochs: list[Epoch]
    losses: list[float]  # of every step of the reporting rank
    ranks: list[RankRecord]
    other_step_s: dict[str, float] = field(default_factory=dict)  # of other methods on the same hosts, by name

    @property
    def step_s(self) -> float | None:
        """The time of a step on the slowest rank; None if no rank has recorded two."""
        return slowest_step_s(self.ranks)

    @property
    def layers(self) -> list[LayerRow]:
        """The per-layer table: means over the ranks, in the first rank's order."""
        return merge_layers([record.layers for record in self.ranks])


def slowest_step_s(ranks: Iterable[RankRecord]) -> float | None:
    """The time of a step on the slowest of these ranks; None if none has recorded two."""
    return max((record.step_s for record in ranks if record.step_s is not None), default=None)


def merge_layers(tables: list[list[LayerRow]]) -> list[LayerRow]:
    """The layers with the mean over the ranks of each figure. Every rank has the same layers, as plans are equal."""
    if not tables:
        return []
    merged = []
    for rows in zip(*tables, strict=True):
        first = rows[0]
        if any(row.name != first.name for row in rows):
            raise ValueError(f"ranks name a layer differently: {sorted({row.name for row in rows})}")

        def mean(figures: Iterable[float | None]) -> float | None:
            known = [figure for figure in figures if figure is not None]
            return statistics.fmean(known) if known else None

        means = {name: mean(getattr(row, name) for row in rows) for name in _FIGURES}
        merged.append(replace(first, factor_count=round(statistics.fmean(row.factor_count for row in rows)), **means))
    return merged


def hidden_share(synchronizations: Iterable[Span], computations: Iterable[Span]) -> float | None:
    """The share of the synchronizations' time during which the model also computed.

    The time is that during which at least one synchronization was under way. The model computes during the whole
    model's forward and backward passes among `computations`. None if no synchronization took any time.
    """
    exchanging = _merged(synchronizations)
    computing = _merged(span for span in computations if span.kind in ("forward", "backward") and not span.layer)
    total = sum(end - start for start, end in exchanging)
    hidden = position = 0
    for start, end in exchanging:
        while position < len(computing) and computing[position][1] <= start:
            position += 1
        for pass_start, pass_end in computing[position:]:
            if pass_start >= end:
                break
            hidden += min(end, pass_end) - max(start, pass_start)
    return hidden / total if total else None


def _merged(spans: Iterable[Span]) -> list[tuple[int, int]]:
    """The times that the spans cover, as disjoint intervals in order."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted((span.start_ns, span.end_ns) for span in spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def typical_step(record: RankRecord) -> int | None:
    """The recorded step of median length. The first step is left out if there are others, because it warms up."""
    lengths: list[tuple[int, int]] = []
    for step in record.steps():
        spans = [span for span in record.spans if span.step == step]
        lengths.append((max(s.end_ns for s in spans) - min(s.start_ns for s in spans), step))
    if not lengths:
        return None
    warm = sorted(lengths[1:] or lengths)
    return warm[len(warm) // 2][1]


def save_rank(record: RankRecord, folder: str | os.PathLike[str]) -> None:
    """Writes one rank's record to `folder`/rank-R.json, whole or not at all."""
    path = Path(folder) / f"rank-{record.rank}.json"
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps(asdict(record)))
    scratch.replace(path)


def load_ranks(folder: str | os.PathLike[str]) -> list[RankRecord]:
    """Reads the records of all ranks that wrote one to `folder`, by rank."""
    records = [_rank_record(json.loads(path.read_text())) for path in Path(folder).glob("rank-*.json")]
    return sorted(records, key=lambda record: record.rank)


def _rank_record(fields: dict[str, Any]) -> RankRecord:
    fields["layers"] = [LayerRow(**{**row, "shape": tuple(row["shape"])}) for row in fields["layers"]]
    fields["spans"] = [Span(**span) for span in fields["spans"]]
    return RankRecord(**fields)
