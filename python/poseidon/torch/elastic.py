"""Data that follows the workers: a sampler that loses no example and deals none twice when workers come and go."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from poseidon.adapter.elastic_order import ElasticOrder, share, step_end
from poseidon.errors import InvalidArgument
from poseidon.torch.process.context import context, data_part


class ElasticSampler(Sampler[list[int]]):
    """Deals the examples of a dataset to the workers that are present, `batch_size` to each in a step.

        sampler = poseidon.ElasticSampler(dataset, batch_size=32, seed=0)
        loader = poseidon.ElasticLoader(dataset, sampler, num_workers=4)
        recovery = poseidon.Recovery(model, optimizer, sampler, seed=0)
        while sampler.epoch < epochs or recovery.until(recovery.step):
            with recovery.attempt():
                inputs, targets = next(loader)
                model.set_weight(len(targets))
                ...

    `dataset` is one, or its number of examples. Which examples a worker takes is a function of `seed`, `epoch`,
    `position` (the examples of this epoch that steps have taken), its rank and the number of workers. The last step of
    an epoch has what is left, up to one example more for each worker, and no padding. Its workers may have one example
    more or less than others: `set_weight` makes the mean one over all examples. Where workers have come, and fewer
    examples are left than there are workers, the step takes the first ones of the next epoch, too.

    Give it to `Recovery`, so that a position counts when its step has been made, and goes back with it. It is a batch
    sampler, too: iterating gives this worker's batches of the rest of the epoch, with the workers that are present now.
    It does not move the position; `advance` does. Raises InvalidArgument for a dataset without examples, or with fewer
    than there are workers.
    """

    def __init__(self, dataset: Sized | int, batch_size: int, seed: int = 0, shuffle: bool = True) -> None:
        if batch_size < 1:
            raise InvalidArgument(f"batch_size is {batch_size}: each worker takes one example or more")
        self._order = ElasticOrder(dataset if isinstance(dataset, int) else len(dataset), seed, shuffle)
        self.batch_size = batch_size
        """The examples that each worker takes in a step, but for the last one of an epoch."""
        self.epoch = 0
        """The number of complete epochs."""
        self.position = 0
        """The examples of this epoch that steps have taken."""
        self.is_recovered = False
        """Whether it was given to `Recovery`, so that a step that fails gives its examples back."""

    def batch(self) -> list[int]:
        """The numbers of the examples that this worker takes in the step that comes."""
        return self._batch(self.position, *data_part())

    def advance(self) -> None:
        """A step takes its examples: the next one comes.

        Raises InvalidArgument where a failure of the step would lose them: with on_failure=rejoin and shrink, outside
        of an attempt of a `Recovery` that has this sampler.
        """
        self._check_undone()
        self.position = self._end(self.position, data_part()[1])
        if self.position >= self._order.example_count:
            self.epoch, self.position = self.epoch + 1, self.position - self._order.example_count

    def _check_undone(self) -> None:
        here = context()
        if here.recovers and not (self.is_recovered and here.in_attempt):
            raise InvalidArgument(
                f"with on_failure={here.settings.on_failure} the examples of a step that fails would be lost: give the "
                "ElasticSampler to poseidon.Recovery, and take batches inside its attempts"
            )

    def __iter__(self) -> Iterator[list[int]]:
        place, position = data_part(), self.position
        while position < self._order.example_count:
            yield self._batch(position, *place)
            position = self._end(position, place[1])

    def __len__(self) -> int:
        """Steps until the end of the epoch, with as many workers as there are now."""
        size = data_part()[1]
        whole, rest = divmod(self._order.example_count - self.position, self.batch_size * size)
        return whole + (rest >= size or (rest > 0 and whole == 0))

    def state_dict(self) -> dict[str, int]:
        """Where the order is, and what it is made of."""
        return {"epoch": self.epoch, "position": self.position, **self._kind()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on from there. Raises InvalidArgument for the state of another dataset or order."""
        kind = {name: value for name, value in state.items() if name not in ("epoch", "position")}
        if kind != self._kind():
            raise InvalidArgument(
                f"the state is of an ElasticSampler with {kind}, and this one has {self._kind()}: make it with the "
                "same dataset, seed and shuffle"
            )
        self.epoch, self.position = state["epoch"], state["position"]

    @property
    def place(self) -> tuple[int, int, int, int]:
        """What the batch that comes depends on, beside the order: epoch, position, rank and number of workers."""
        return self.epoch, self.position, *data_part()

    def _batch(self, position: int, rank: int, size: int) -> list[int]:
        begin, end = share(position, self._end(position, size), rank, size)
        return self._order.examples(self.epoch, begin, end).tolist()  # type: ignore[no-any-return]

    def _end(self, position: int, size: int) -> int:
        if self._order.example_count < size:
            raise InvalidArgument(
                f"the dataset has {self._order.example_count} examples for {size} workers: each takes one or more in a "
                "step"
            )
        return step_end(self._order.example_count, position, self.batch_size * size, size)

    def _kind(self) -> dict[str, int]:
        return {"examples": self._order.example_count, "seed": self._order.seed, "shuffle": int(self._order.shuffle)}


class ComparedPosition:
    """The position of a sampler, which is the same on all ranks in every exchange (`Compared` of step_check.py)."""

    def __init__(self, sampler: ElasticSampler) -> None:
        self._sampler = sampler

    def digest(self) -> bytes:
        """Of epoch and position."""
        return f"{self._sampler.epoch} {self._sampler.position}".encode()

    def sent(self) -> None:
        """Nothing is counted from exchange to exchange."""

    def lines(self) -> list[str]:
        """What the digest was made of."""
        return [f"the place of an ElasticSampler\tepoch {self._sampler.epoch}, position {self._sampler.position}"]


class ElasticLoader:
    """The batches that an `ElasticSampler` deals to this worker, loaded ahead. `next` gives that of the coming step.

    What was loaded ahead is dropped when workers have come or gone, or training has gone back: then the examples are
    dealt anew. It never ends: `sampler.epoch` says when an epoch is over. `options` are those of `loader`, a class with
    the arguments of torch's DataLoader, which that is by default; `torchdata`'s StatefulDataLoader is another one.

    Without processes that load (`num_workers=0`), random transforms draw from the streams that `Recovery` seeds. In
    such processes the numbers depend on what was loaded before: seed them by the example, if every bit counts.
    """

    def __init__(self, dataset: Any, sampler: ElasticSampler, loader: Any = DataLoader, **options: Any) -> None:
        for name in ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"):
            if name in options:
                raise InvalidArgument(f"ElasticLoader got {name}, which the sampler decides: leave it out")
        self._sampler = sampler
        # Otherwise each iterator draws from torch's stream, and training draws other numbers after workers have come.
        self._generator = options.setdefault("generator", torch.Generator())
        self._make = lambda: iter(loader(dataset, batch_sampler=sampler, **options))
        self._batches: Iterator[Any] | None = None
        self._place: tuple[int, int, int, int] | None = None  # of the batch that `_batches` gives next

    def __iter__(self) -> ElasticLoader:
        return self

    def __next__(self) -> Any:
        """The batch of the step that comes, whose examples are taken."""
        if self._batches is None or self._place != self._sampler.place:
            self._batches = None  # ends the processes that load before others begin
            self._generator.manual_seed(hash((self._sampler.epoch, self._sampler.position)) % (1 << 63))
            self._batches = self._make()
        batch, epoch = next(self._batches), self._sampler.epoch
        self._sampler.advance()
        self._place = self._sampler.place
        if self._sampler.epoch > epoch:
            self._batches = None
        return batch
