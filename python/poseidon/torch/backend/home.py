"""The client that a process's groups of the backend share."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from torch.distributed import PrefixStore

from poseidon import _core
from poseidon.adapter.failure_watch import FailureWatch
from poseidon.adapter.store import SharedStore
from poseidon.errors import Mismatch, PoseidonError
from poseidon.notices import tell_notices
from poseidon.options import resolve
from poseidon.torch.backend.calls import Calls
from poseidon.torch.process.process_groups import place_in, world

WHOLE = 0
"""The id of the communicator of all ranks of a home."""


class Home:
    """A client of some ranks of torch.distributed, which are the communicators' ranks. Collective among them.

    `ranks`: those of the client, as torch.distributed numbers its world. `store`: what only these ranks see.
    """

    def __init__(self, store: Any, rank: int, ranks: Sequence[int], timeout_s: float | None, name: str) -> None:
        # Groups of a program that forms its world anew in one store do not see what the former ones have published.
        store = PrefixStore(f"poseidon/{store.add(f'poseidon/{rank}', 1)}", store)
        # The variables of a launcher are about the world, which torch forms first.
        place = world() or place_in(store, rank, len(ranks))
        settings = resolve(**asdict(place), timeout=timeout_s)
        settings = settings.replace(
            rank=rank,
            world_size=len(ranks),
            job=f"{settings.job}.{name}"[:64],
            servers=(),
            server_cores=0,
            on_failure="abort",
            stragglers="wait",
            consistency="bsp",
            checkpoint_dir="",
        )
        _homes.watch()
        self.ranks = tuple(ranks)
        self._made: Counter[str] = Counter()
        self.threads: set[int] = set()  # that have called a collective
        self.store = store
        self.timeout_s = settings.timeout
        self.client = _core.Client.connect(settings.core(), SharedStore(store, settings))
        _homes.all.add(self)
        tell_notices(self.client)
        self.collectives = self.client.collectives
        self.collectives.add(WHOLE, list(range(len(ranks))))
        self.calls = Calls(store, rank, len(ranks), self.collectives.done)

    def new_communicator(self, group_rank: int, ranks: Sequence[int], name: str) -> int:
        """The id of a communicator for the group of this name, of these ranks of the world. Collective among them."""
        self._made[name] += 1  # a program may give a name again, to the same ranks
        key = f"communicator/{name}/{self._made[name]}"
        if group_rank == 0:
            self.store.set(key, str(self.store.add("communicators", 1)))
        number = int(self.store.get(key))
        self.collectives.add(number, [self.ranks.index(rank) for rank in ranks])
        return number

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """The error of a job that has ended because ranks' calls differ says what each rank has called, and where."""
        try:
            yield
        except Mismatch as error:
            raise Mismatch(f"{error}; under way were: {self.calls.of_all_ranks()}") from None

    def has(self, ranks: Sequence[int]) -> bool:
        """Whether all of these ranks of the world are the home's."""
        return set(ranks) <= set(self.ranks)

    def abort(self, why: str) -> None:
        """Ends all calls of all groups, on all ranks."""
        self.client.abort(why)

    def end(self) -> None:
        """Leaves. Calls that are under way end with an error."""
        self.client.shutdown()


class _Homes(FailureWatch):
    """The homes of this process, whose other ranks hear of an unhandled error, and of the end of the program."""

    def __init__(self) -> None:
        super().__init__()
        self.all: weakref.WeakSet[Home] = weakref.WeakSet()

    def failures(self) -> list[PoseidonError]:
        """What has ended jobs of this process."""
        return [failure for home in self.all if (failure := home.client.failure) is not None]

    def tell(self, error: BaseException) -> None:
        """Tells the other ranks that this one fails with `error`."""
        text = "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
        for home in self.all:
            home.client.abort(f"rank {home.client.rank} failed: {text}")

    def trains(self, thread: int) -> bool:
        """Whether this thread has called a collective."""
        return any(thread in home.threads for home in self.all)

    def end(self) -> None:
        """Leaves all jobs."""
        for home in list(self.all):
            home.end()


_homes = _Homes()
