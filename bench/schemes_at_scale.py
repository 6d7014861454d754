"""What does choosing the scheme of each layer gain on hundreds of workers? Simulated steps.

Compares `auto` with the better of `ps` and `sfb` for VGG19-22K, and for a classifier of 4096 inputs and 128,000 classes
by itself, on 256 and 1,024 workers. Compute, and products of factors, are those of a Titan X at the rate of VGG19-22K.

    python bench/schemes_at_scale.py        # a few seconds; prints the table of docs/planning.md
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from poseidon.models import LayerSpec, ModelTable, model_table
from poseidon.planner import ClusterSpec, Exchange, Planner, Prediction

WORKERS, BATCHES, GBIT_PER_S = (256, 1024), (32, 8), (10, 25, 100)
INPUTS, CLASSES = 4096, 128_000


def tables(batch: int) -> Iterator[ModelTable]:
    """Both models with this batch. Time is in proportion to the FLOPs."""
    network = model_table("VGG19-22K")
    seconds_per_flop = network.iteration_seconds / network.batch / network.flops
    layer = LayerSpec("head", "fc", (CLASSES, INPUTS), False, 2.0 * CLASSES * INPUTS)
    for table in (network, replace(network, name="head 4096 x 128k", layers=(layer,))):
        yield replace(table, batch=batch, iteration_seconds=seconds_per_flop * table.flops * batch)


@dataclass(frozen=True)
class Row:
    """One cluster's steps by scheme."""

    words: tuple[str, ...]
    ps_s: float
    sfb_s: float
    auto: Prediction
    best_s: float  # with the fastest of all choices, each simulated

    @property
    def gain(self) -> float:
        """The better of ps and sfb over auto."""
        return min(self.ps_s, self.sfb_s) / self.auto.step_s

    @property
    def best(self) -> float:
        """The same for the best choice."""
        return min(self.ps_s, self.sfb_s) / self.best_s

    @property
    def most(self) -> float:
        """The same if the exchange took no time."""
        return min(self.ps_s, self.sfb_s) / self.auto.table.iteration_seconds

    def __str__(self) -> str:
        largest = max(self.auto.loads, key=lambda load: load.unit.facts.size_bytes)
        texts = (*self.words, f"{self.ps_s:.4g}", f"{self.sfb_s:.4g}", f"{self.auto.step_s:.4g}", largest.scheme)
        return f"| {' | '.join(texts)} | {self.gain:.2f} | {self.best:.2f} | {self.most:.2f} |"


def rows() -> Iterator[Row]:
    """All cells."""
    for batch, workers, rate in product(BATCHES, WORKERS, GBIT_PER_S):
        for table in tables(batch):
            ps, sfb, auto = (
                Planner(table, ClusterSpec(workers, rate * 1e9), Exchange(scheme=scheme))
                for scheme in ("ps", "sfb", "auto")
            )
            words = (table.name, str(batch), str(workers), str(rate))
            yield Row(words, ps.predict().step_s, sfb.predict().step_s, auto.predict(), auto.predict_best().step_s)


def main() -> None:
    print("| model | batch | workers | Gb/s | ps, s | sfb, s | auto, s | its largest layer | gain | best | at most |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for row in sorted(rows(), key=lambda row: row.words[0], reverse=True):
        print(row, flush=True)


if __name__ == "__main__":
    main()
