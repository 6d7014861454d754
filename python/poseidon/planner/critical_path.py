"""What a predicted step's time consists of: the chain of activities, each of which waited for the one before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from poseidon.planner.clock import BACKWARD, FORWARD, NETWORK, PRODUCT, SERVERS, Activity
from poseidon.planner.predict import Prediction
from poseidon.report.svg import percent_text

_LEAST_SHARE = 0.01
_NAMED = 3  # layers of a port


@dataclass(frozen=True)
class Part:
    """A part of the critical path: what a resource did without a pause. `name` is the layer's, or the group's."""

    where: str
    what: str
    name: str
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.begin_s

    @property
    def place(self) -> str:
        """What takes the time, in words: a pass of the model, products, a port or another carrier, or latency."""
        if self.where == NETWORK:
            return "latency"
        if self.where == SERVERS:
            return "products in servers"
        if self.what not in (FORWARD, BACKWARD, PRODUCT):
            return f"the {self.where}"
        _, of, host = self.where.partition(" of ")
        return (
            f"the {self.what} pass{of}{host}" if self.what != PRODUCT else f"products of factors{of and ' on '}{host}"
        )


def critical_path(step: Prediction) -> list[Part]:
    """The path from the begin of the step to its end. No part of it can be left out without making the step shorter."""
    parts: list[Part] = []
    for activity in reversed(list(step.last.chain())):
        if activity.end_s == activity.begin_s:
            continue
        name = _name(step, activity)
        if parts and (parts[-1].where, parts[-1].what, parts[-1].name) == (activity.where, activity.what, name):
            parts[-1] = Part(activity.where, activity.what, name, parts[-1].begin_s, activity.end_s)
        else:
            parts.append(Part(activity.where, activity.what, name, activity.begin_s, activity.end_s))
    return parts


def _name(step: Prediction, activity: Activity) -> str:
    if activity.what in (FORWARD, BACKWARD):
        return step.table.layers[activity.of].name
    return step.loads[activity.of].unit.name


def shares(parts: Sequence[Part]) -> dict[str, dict[str, float]]:
    """The seconds of each place and, in it, of each layer; the longest first."""
    found: dict[str, dict[str, float]] = {}
    for part in parts:
        layers = found.setdefault(part.place, {})
        layers[part.name] = layers.get(part.name, 0.0) + part.seconds
    ordered = sorted(found.items(), key=lambda item: -sum(item[1].values()))
    return {place: dict(sorted(layers.items(), key=lambda item: -item[1])) for place, layers in ordered}


def path_words(parts: Sequence[Part], with_layers: bool = True) -> str:
    """The same in words: "72 % the port of host 3 (fc6.weight 38 %, fc7.weight 12 %, …), 28 % the backward pass"."""
    total = sum(part.seconds for part in parts)
    named, left = [], 1.0
    for place, layers in shares(parts).items():
        share = sum(layers.values()) / total
        if share < _LEAST_SHARE:
            continue
        left -= share
        within = _layers(layers, total) if with_layers and place.startswith("the port") else ""
        named.append(f"{percent_text(share)} {place}{within}")
    named += [f"{percent_text(left)} others"] if left >= _LEAST_SHARE else []
    return f"{', '.join(named[:-1])} and {named[-1]}" if len(named) > 1 else named[0]


def _layers(layers: Mapping[str, float], total: float) -> str:
    large = [(name, seconds / total) for name, seconds in layers.items() if seconds / total >= _LEAST_SHARE]
    named = [f"{name} {percent_text(share)}" for name, share in large[:_NAMED]]
    named += ["…"] if named and len(named) < len(layers) else []
    return f" ({', '.join(named)})" if named else ""
