"""The client that a process's groups of the backend share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from poseidon import _core
from poseidon.adapter.store import SharedStore
from poseidon.notices import tell_notices
from poseidon.options import resolve
from poseidon.torch.backend.calls import Calls
from poseidon.torch.process.process_groups import place_in

_COMMUNICATORS = "poseidon/communicators"
WHOLE = 0
"""The id of the communicator of all ranks of a home."""


class Home:
    """A client of some ranks of torch.distributed, which are the communicators' ranks. Collective among them.

    `ranks`: those of the client, as torch.distributed numbers its world. `store`: what only these ranks see.
    """

    def __init__(self, store: Any, rank: int, ranks: Sequence[int], timeout_s: float | None, name: str) -> None:
        place = place_in(store, rank, len(ranks))
        settings = resolve(**asdict(place), timeout=timeout_s)
        settings = settings.replace(
            job=f"{settings.job}.{name}"[:64],
            servers=(),
            server_cores=0,
            on_failure="abort",
            stragglers="wait",
            consistency="bsp",
            checkpoint_dir="",
        )
        self.ranks = tuple(ranks)
        self.store = store
        self.timeout_s = settings.timeout
        self.client = _core.Client.connect(settings.core(), SharedStore(store, settings))
        tell_notices(self.client)
        self.collectives = self.client.collectives
        self.collectives.add(WHOLE, list(range(len(ranks))))
        self.calls = Calls(store, rank, len(ranks), self.collectives.done)

    def new_communicator(self, group_rank: int, ranks: Sequence[int], store: Any) -> int:
        """The id of a communicator of these ranks of the world. Collective among them; `store` is theirs."""
        if group_rank == 0:
            store.set("communicator", str(self.store.add(_COMMUNICATORS, 1)))
        number = int(store.get("communicator"))
        self.collectives.add(number, [self.ranks.index(rank) for rank in ranks])
        return number

    def has(self, ranks: Sequence[int]) -> bool:
        """Whether all of these ranks of the world are the home's."""
        return set(ranks) <= set(self.ranks)

    def abort(self, why: str) -> None:
        """Ends all calls of all groups, on all ranks."""
        self.client.abort(why)

    def end(self) -> None:
        """Leaves. Calls that are under way end with an error."""
        self.client.shutdown()
