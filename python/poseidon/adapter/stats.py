"""Figures of a step's synchronization, layer by layer. Times are those of the monotonic clock, in ns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from poseidon import _core
from poseidon.adapter.layer import SyncedLayer


class BackwardPass(Protocol):
    """A synchronizing backward pass. Times are of the monotonic clock."""

    forward_begin_ns: int  # of the forward pass before it
    begin_ns: int
    end_ns: int
    waited_ns: int  # for results, by the thread that trains

    def recorded(self) -> Iterable[tuple[SyncedLayer, int]]:
        """The layers in the order in which their exchanges were started, and when each gradient was complete."""


@dataclass(frozen=True)
class LayerSynchronization:
    """One layer's synchronization in one step."""

    name: str
    scheme: str
    factor_count: int  # K, or rows, summed over the workers; 0 where unknown
    bytes_sent: int  # on the wire, headers included, by this worker
    bytes_received: int
    gradient_ready_ns: int
    started_ns: int
    completed_ns: int
    compute_ns: int  # of these, at the end: products or sums of what has arrived
    backward_begin_ns: int
    backward_end_ns: int

    @property
    def bytes(self) -> int:
        """Bytes sent and received."""
        return self.bytes_sent + self.bytes_received

    @property
    def seconds(self) -> float:
        """The time of the exchange from when the gradient existed, including the wait for the layer's group."""
        return (self.completed_ns - max(self.started_ns, self.gradient_ready_ns)) / 1e9

    @property
    def hidden_share(self) -> float:
        """The part of the synchronization, 0 to 1, that ran while backward was still computing."""
        duration = self.completed_ns - self.started_ns
        if duration <= 0:
            return 1.0
        hidden = min(self.completed_ns, self.backward_end_ns) - self.started_ns
        return max(0.0, hidden / duration)


@dataclass(frozen=True)
class StepRecord:
    """All layers of one step, in the order of backward.

    The last two are of the runs that the option `record` records: the begin of the forward pass before it, and how long
    the thread that trains has waited for results.
    """

    backward_begin_ns: int
    backward_end_ns: int
    layers: list[LayerSynchronization]
    forward_begin_ns: int = 0
    waited_ns: int = 0

    @staticmethod
    def of(run: BackwardPass, client: _core.Client) -> StepRecord:
        """The client's figures for the exchanges of `run`, the latest step."""
        layers = [
            _synchronization(entry, client.layer_stats(entry.layer), ready_ns, run.begin_ns, run.end_ns)
            for entry, ready_ns in run.recorded()
        ]
        return StepRecord(run.begin_ns, run.end_ns, layers)


def latest_synchronization(layers: Iterable[SyncedLayer], client: _core.Client) -> list[LayerSynchronization]:
    """The figures of the layers' latest exchanges, where nobody has seen the backward pass: it is taken to last from
    the begin of the first exchange to that of the last one."""
    own = list(layers)
    return synchronization_of(own, [client.layer_stats(layer.layer) for layer in own])


def synchronization_of(layers: Sequence[SyncedLayer], seen: Sequence[_core.LayerStats]) -> list[LayerSynchronization]:
    """The figures of one step's exchanges, in the order in which they began: backward is taken to last as long."""
    starts = [stats.started_ns for stats in seen] or [0]
    order = sorted(zip(layers, seen, strict=True), key=lambda pair: pair[1].started_ns)
    return [_synchronization(layer, stats, stats.started_ns, min(starts), max(starts)) for layer, stats in order]


def _synchronization(
    layer: SyncedLayer, stats: _core.LayerStats, ready_ns: int, begin_ns: int, end_ns: int
) -> LayerSynchronization:
    return LayerSynchronization(
        name=layer.name,
        scheme=stats.scheme,
        factor_count=stats.factor_count if layer.factorable or layer.row_gradient else 0,
        bytes_sent=stats.bytes_sent,
        bytes_received=stats.bytes_received,
        gradient_ready_ns=ready_ns,
        started_ns=stats.started_ns,
        completed_ns=stats.completed_ns,
        compute_ns=stats.compute_ns,
        backward_begin_ns=begin_ns,
        backward_end_ns=end_ns,
    )


class Recorder:
    """Keeps the records of steps while `enabled`."""

    def __init__(self) -> None:
        self.enabled = False
        self.steps: list[StepRecord] = []

    def step_finished(self, run: BackwardPass, client: _core.Client | None) -> None:
        """Called after every synchronizing backward."""
        if self.enabled:
            assert client is not None
            self.steps.append(StepRecord.of(run, client))
