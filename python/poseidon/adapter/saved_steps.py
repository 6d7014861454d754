"""Keeps what servers save in one step, so that a version (docs/checkpoints.md) is one moment of the program.

A server saves each layer as it was after the layer's own step of the version's number. Layers of models that step at
different rates would be saved at different moments. So before a layer makes step n + 1, all others have made step n:
those that have not take part in it with nothing, on all ranks, which changes no value. Models that get their gradients
from the same backward pass have made the same number of steps before. Where ranks are in different steps
(stragglers="drop"), they cannot: layers that step at different rates are refused. A program that has not asked for
checkpoints, on servers that save for others, gets a warning in place of an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from poseidon import _core
from poseidon.errors import InvalidArgument, Mismatch


class Settles(Protocol):
    """What one model has in flight."""

    def settle(self) -> None:
        """Waits until nothing is."""

    def expected(self) -> Sequence[int]:
        """Its layers on servers, if the backward pass that runs now may be one of their steps and has not begun it."""


class SavedSteps:
    """The steps of all layers of a job that servers save. Use it from the thread that trains.

    All ranks make the same calls. `in_flight` has every model that may have something of these layers in flight.
    `together`: all ranks are in the same step. `asked`: the program has a checkpoint_dir, and not only the servers.
    """

    def __init__(self, client: _core.Client, in_flight: Iterable[Settles], together: bool, asked: bool) -> None:
        self._client, self._together, self._asked = client, together, asked
        self._given_up = False
        self._in_flight = in_flight
        self._counts: dict[int, int] = {}  # steps, by layer; also of layers whose model the program has dropped
        self._places: dict[int, Any] = {}  # arrays into which nothing is received
        self.version: int | None = None  # from which the layers have gone on; None: nobody has asked for one

    def check_new(self) -> None:
        """It is too late for further layers, which would always be steps behind the others, when a step has begun."""
        if any(self._counts.values()):
            self._give_up(
                "with checkpoint_dir servers count the steps of all parameters from the same beginning: make every "
                "DistributedOptimizer with update='server' before the first step"
            )

    def _give_up(self, why: str) -> None:
        """What servers save from now on is of no use. Raises InvalidArgument if the program has asked for it."""
        if self._asked:
            raise InvalidArgument(f"{why}, or leave checkpoint_dir out")
        if not self._given_up:
            warnings.warn(f"what the dedicated servers save of this job is not of one step: {why}", stacklevel=2)
        self._given_up = True

    def add(self, places: Mapping[int, Any]) -> None:
        """The layers of these are saved from now on. The arrays have the layers' sizes, and nobody else uses them."""
        for layer, place in places.items():
            self._counts[layer] = 0
            self._places[layer] = place

    def resumed(self, version: int) -> None:
        """Some layers have gone on from this version; 0: they have begun. Raises Mismatch if others did otherwise."""
        if self.version is not None and self.version != version:
            raise Mismatch(
                f"one DistributedOptimizer went on from version {self.version} in checkpoint_dir and another one from "
                f"version {version} (0: from none): pass resume=True to all of them, and if you did, start all workers "
                "again, because a file was damaged or came late"
            )
        self.version = version

    def begin(self, layers: Sequence[int], missed: bool) -> None:
        """These layers begin a step. Collective if others are behind. `missed`: the other ranks have made it before."""
        if self._given_up:
            return
        level = [*layers, *(layer for model in list(self._in_flight) for layer in model.expected())]
        reached = max((self._counts[layer] for layer in level), default=0)
        behind = [layer for layer, count in self._counts.items() if count < reached]
        if not self._together:
            if behind and not missed:
                self._give_up(
                    "a step of one model with update='server' came before another model had made the step of this "
                    "number; servers save each model after its own steps, and with stragglers='drop' workers cannot "
                    "make up for it together: make the steps of all models at the same rate, leave stragglers out"
                )
            behind = []
        if behind:
            for model in list(self._in_flight):
                model.settle()
            self._wait(behind)
        while behind:
            self._take_part(behind)
            behind = [layer for layer in behind if self._counts[layer] < reached]
        for layer in layers:
            self._counts[layer] += 1

    def _take_part(self, layers: Sequence[int]) -> None:
        """Makes a step of these with nothing."""
        for layer in layers:
            self._client.start_absent(layer, self._places[layer], self._client.world_size)
            self._counts[layer] += 1
        self._wait(layers)
        if any(self._client.layer_stats(layer).present for layer in layers):
            text = (
                "the ranks made the steps of several models in different order, with update='server' and "
                "checkpoint_dir: make them in the same order on all ranks"
            )
            self._client.abort(text)
            raise Mismatch(text)

    def _wait(self, layers: Sequence[int]) -> None:
        for layer in layers:
            self._client.wait(layer)
