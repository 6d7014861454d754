"""Data that follows the workers: a sampler that loses no example and deals none twice when workers come and go."""

from __future__ import annotations

import operator
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Sized
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from poseidon.adapter.elastic_order import ElasticOrder, share, step_end
from poseidon.errors import InvalidArgument
from poseidon.torch.process.context import context


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
        self._order = ElasticOrder(count_of(dataset), _whole("seed", seed), shuffle)
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
        return self._batch(self.position, *context().data_part)

    def advance(self) -> None:
        """A step takes its examples: the next one comes.

        Raises InvalidArgument where a failure of the step would lose them: with on_failure=rejoin and shrink, outside
        of an attempt of a `Recovery` that has this sampler.
        """
        self.check_undone()
        self.position = self._end(self.position, context().data_part[1])
        if self.position >= self._order.example_count:
            self.epoch, self.position = self.epoch + 1, self.position - self._order.example_count

    def check_undone(self) -> None:
        """Raises what `advance` would."""
        here = context()
        if here.recovers and not (self.is_recovered and here.in_attempt):
            raise InvalidArgument(
                f"with on_failure={here.settings.on_failure} the examples of a step that fails would be lost: give the "
                "ElasticSampler to poseidon.Recovery, and take batches inside its attempts"
            )

    def __iter__(self) -> Iterator[list[int]]:
        place, position = context().data_part, self.position
        while position < self._order.example_count:
            yield self._batch(position, *place)
            position = self._end(position, place[1])

    def __len__(self) -> int:
        """Steps until the end of the epoch, with as many workers as there are now."""
        size = context().data_part[1]
        whole, rest = divmod(self._order.example_count - self.position, self.batch_size * size)
        return whole + (rest >= size or (rest > 0 and whole == 0))

    def state_dict(self) -> dict[str, int]:
        """Where the order is, and what it is made of."""
        return {"epoch": self.epoch, "position": self.position, **self._kind()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on from there. Raises InvalidArgument for the state of another dataset or order."""
        kind = {name: value for name, value in state.items() if name not in ("epoch", "position")}
        if kind != self._kind() or not {"epoch", "position"} <= state.keys():
            raise InvalidArgument(
                f"the state is of an ElasticSampler with {kind}, and this one has {self._kind()}: make it with the "
                "same dataset, seed and shuffle"
            )
        self.epoch, self.position = state["epoch"], state["position"]

    def __getstate__(self) -> dict[str, Any]:
        """A copy was not given to `Recovery`."""
        return {**vars(self), "is_recovered": False}

    def describe(self) -> str:
        """What must be the same on all ranks, whenever."""
        return ", ".join(f"{name} {value}" for name, value in {**self._kind(), "batch_size": self.batch_size}.items())

    @property
    def seed(self) -> int:
        """That of the order."""
        return self._order.seed

    @property
    def place(self) -> tuple[int, int, int, int]:
        """What the batch that comes depends on, beside the order: epoch, position, rank and number of workers."""
        return self.epoch, self.position, *context().data_part

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


def count_of(dataset: Any) -> int:
    """The number of examples. Raises InvalidArgument for a dataset whose examples have no numbers."""
    if hasattr(dataset, "__index__") and not hasattr(dataset, "__len__"):  # a tensor has both
        return _whole("dataset", dataset)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise InvalidArgument(
            f"the dataset is a {type(dataset).__name__}, whose examples have no numbers: give one with __len__ and "
            "__getitem__"
        )
    return len(dataset)


def _whole(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidArgument(f"{name} is {value!r}: it must be a whole number") from None


class ComparedPosition:
    """The position of a sampler, which is the same on all ranks in every exchange (`Compared` of step_check.py)."""

    def __init__(self, sampler: ElasticSampler) -> None:
        self._sampler = sampler

    def digest(self) -> bytes:
        """Of epoch and position, and of what the sampler is made of."""
        return self._text().encode()

    def sent(self) -> None:
        """Nothing is counted from exchange to exchange."""

    def lines(self) -> list[str]:
        """What the digest was made of."""
        return [f"the place of an ElasticSampler\t{self._text()}"]

    def _text(self) -> str:
        return f"epoch {self._sampler.epoch}, position {self._sampler.position}, {self._sampler.describe()}"


class _LoaderProcess:
    """Begins a process that loads. The first SIGTERM is for the one that trains, which makes its step and then leaves.

    Launchers send it to all processes. What ends a process that does not answer any more is another one.
    """

    def __init__(self, inner: Callable[[int], object] | None) -> None:
        self._inner = inner

    def __call__(self, number: int) -> None:
        signal.signal(signal.SIGTERM, _take_the_next)
        if self._inner is not None:
            self._inner(number)


def _take_the_next(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_DFL)


_loaders: weakref.WeakSet[ElasticLoader] = weakref.WeakSet()  # with processes


def _end_loaders() -> None:
    """At the end of a process of `multiprocessing`, which sends its children one SIGTERM, and waits for them."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler takes their end for a failure
    for loader in list(_loaders):
        loader.kill_processes()


class ElasticLoader:
    """The batches that an `ElasticSampler` deals to this worker, loaded ahead. `next` gives that of the coming step.

    What was loaded ahead is dropped when workers have come or gone, or training has gone back: then the examples are
    dealt anew. So they are if loading fails. It never ends: `sampler.epoch` says when an epoch is over. `options` are
    those of `loader`, a class with the arguments of torch's DataLoader, which that is by default; `torchdata`'s
    StatefulDataLoader is another one. Processes that load begin with each epoch, and whenever examples are dealt anew.

    Without such processes (`num_workers=0`), random transforms draw from the streams that `Recovery` seeds. In
    processes their streams depend on seed, rank and place, and on what a process has loaded since it has begun: seed
    them by the example, if every bit counts. Raises InvalidArgument for options that the sampler decides.
    """

    def __init__(self, dataset: Any, sampler: ElasticSampler, loader: Any = DataLoader, **options: Any) -> None:
        for name in ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"):
            if name in options:
                raise InvalidArgument(f"ElasticLoader got {name}, which the sampler decides: leave it out")
        if not options.get("in_order", True):
            raise InvalidArgument("in_order=False would count examples that have yet to come: leave it out")
        count_of(dataset)
        self._sampler = sampler
        # Otherwise each iterator draws from torch's stream, and training draws other numbers after workers have come.
        self._generator = torch.Generator() if options.get("generator") is None else None
        if self._generator is not None:
            options["generator"] = self._generator
        if options.get("num_workers"):
            options["worker_init_fn"] = _LoaderProcess(options.get("worker_init_fn"))
            if not _loaders:
                Finalize(None, _end_loaders, exitpriority=1)
            _loaders.add(self)
        self._make = lambda: iter(loader(dataset, batch_sampler=sampler, **options))
        self._batches: Iterator[Any] | None = None
        self._place: tuple[int, int, int, int] | None = None  # of the batch that `_batches` gives next

    def kill_processes(self) -> None:
        """Kills those that load, which have nothing to lose."""
        for process in getattr(self._batches, "_workers", ()):  # torch's name, and torchdata's
            process.kill()

    def __iter__(self) -> ElasticLoader:
        return self

    def __next__(self) -> Any:
        """The batch of the step that comes, whose examples are taken."""
        self._sampler.check_undone()
        if self._place != self._sampler.place:
            self._batches = None  # ends the processes that load before others begin
        if self._batches is None:
            if self._generator is not None:
                self._generator.manual_seed(hash((self._sampler.seed, *self._sampler.place)) % (1 << 63))
            self._batches = self._make()
        epoch = self._sampler.epoch
        try:
            batch = next(self._batches)
        except BaseException:
            self._batches = None  # which has gone on to the batch after it
            raise
        self._sampler.advance()
        self._place = self._sampler.place
        if self._sampler.epoch > epoch:
            self._batches = None
        return batch
