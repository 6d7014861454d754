"""A synchronizer whose failures wait for the end of the attempt, because ranks of its replica are not to wait in vain.

Once an exchange of a rank has failed nothing of its attempt will count (`ShardGroup`). The rank goes on without
exchanging anything, so that it takes part in what torch does inside the replica.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from poseidon.adapter.features import Features
from poseidon.adapter.membership import Membership
from poseidon.adapter.shard_group import ShardGroup
from poseidon.errors import PoseidonError
from poseidon.options import Settings
from poseidon.torch.exchange.flights import Flights
from poseidon.torch.exchange.pending_exchange import PendingExchange
from poseidon.torch.exchange.runs import BackwardRun
from poseidon.torch.exchange.synchronizer import Synchronizer
from poseidon.torch.model.parameters import SyncedParameter


class DeferringFlights(Flights):
    """Those of a model in whose void attempts nobody waits for exchanges. Values are then those of this rank."""

    def __init__(self, shards: ShardGroup, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._shards = shards

    def _bring(self, entries: Iterable[SyncedParameter]) -> None:
        self._shards.unless_void(super()._bring, entries)

    def land_in_backward(self, pending: PendingExchange) -> None:
        self._shards.unless_void(super().land_in_backward, pending)


class DeferringSynchronizer(Synchronizer):
    """That of a model of which this rank has a shard, `shards` being the ranks of its replica, in the job `here`."""

    def __init__(
        self,
        entries: list[SyncedParameter],
        settings: Settings,
        features: Features,
        here: Membership,
        shards: ShardGroup,
    ) -> None:
        self._here, self._shards = here, shards
        super().__init__(entries, settings, features)

    def _make_flights(self) -> Flights:
        return DeferringFlights(self._shards, self.entries, self.runs, weakref.ref(self))

    @property
    def is_void(self) -> bool:
        return self._shards.is_void

    def confirm_attempt(self) -> None:
        if not self._shards.awaits_confirmation:
            return
        for one in self._here.in_flight:
            if isinstance(one, Synchronizer):
                one.settle_updates()
        self._shards.confirm()

    def before_factors(self) -> None:
        self._shards.unless_void(super().before_factors)

    def before_accumulation(self, entry: SyncedParameter, dense: bool) -> None:
        self._shards.unless_void(super().before_accumulation, entry, dense)

    def after_accumulation(self, entry: SyncedParameter) -> None:
        self._shards.unless_void(super().after_accumulation, entry)

    def end_backward(self, run: BackwardRun) -> None:
        self._shards.unless_void(super().end_backward, run)

    def check_forward(self) -> None:
        if not self.is_void:
            super().check_forward()

    def hear_of(self, failure: PoseidonError) -> None:
        self._shards.unless_void(super().hear_of, failure)

    def check_ended(self) -> None:
        if not self.is_void:
            super().check_ended()
