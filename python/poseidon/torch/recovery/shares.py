"""The batches that one of several workers takes of a loop that believes to be alone.

An epoch is a permutation of the examples, from a seed. Each step takes the next `batch_size` of every worker. So what a
worker takes is a function of epoch and step, and a replacement begins anywhere without loading what is past.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Sampler

from poseidon.adapter.elastic_order import ElasticOrder
from poseidon.torch.elastic import count_of
from poseidon.torch.process.context import context
from poseidon.torch.recovery.objects import seed_streams


class RankSampler(Sampler[int]):
    """The examples of one rank in an epoch, batch by batch. All ranks have as many.

    Where the last step has fewer examples it takes some of the epoch's first ones again, or with `drop_last` it is left
    out. Python's, NumPy's and torch's streams are seeded for each batch, just before it is loaded.
    """

    def __init__(self, dataset: Any, seed: int, shuffle: bool, batch_size: int, drop_last: bool) -> None:
        """Raises InvalidArgument for a dataset whose examples have no numbers."""
        self._order = ElasticOrder(count_of(dataset), seed, shuffle)
        self._batch_size = batch_size
        self._rank, self._world_size = context().data_part
        whole, rest = divmod(self._order.example_count, batch_size * self._world_size)
        self._steps = whole + (rest > 0 and not drop_last)
        self._epoch = 0
        self.first_step = 0  # of those that the next iteration gives

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next iteration."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._steps * self._batch_size

    def __iter__(self) -> Iterator[int]:
        for step in range(self.first_step, self._steps):
            begin = (step * self._world_size + self._rank) * self._batch_size
            numbers = self._numbers(begin, begin + self._batch_size)
            seed_streams(self._order.seed, self._rank, self._epoch * self._steps + step)
            yield from numbers

    def _numbers(self, begin: int, end: int) -> Iterator[int]:
        """The examples at these positions, which go on at the epoch's beginning behind its end."""
        while begin < end:
            first = begin % self._order.example_count
            last = min(first + end - begin, self._order.example_count)
            yield from self._order.examples(self._epoch, first, last).tolist()
            begin += last - first


class RankLoader:
    """A loader of a RankSampler: everything that it does not do otherwise is the loader's."""

    def __init__(self, loader: Any, sampler: RankSampler) -> None:
        self._loader, self._sampler = loader, sampler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)
