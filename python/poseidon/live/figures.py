"""A worker's figures, as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class LayerFigures:
    """A layer's exchange in one step: the bytes of this worker, headers included, and from gradient to result."""

    name: str
    scheme: str
    bytes_sent: int
    bytes_received: int
    seconds: float


@dataclass(frozen=True)
class LinkFigures:
    """What the kernel knows of this worker's TCP connections to one address.

    `bits_per_s`: of what was sent since the figures before, while something waited for its acknowledgement. None: too
    little was sent.
    """

    peer: str
    bits_per_s: float | None
    round_trip_s: float
    resent_packets: int  # since the connections began


@dataclass(frozen=True)
class WorkerFigures:
    """What a worker is doing. Totals are of this generation of the job; `layers` are those of the step `step`.

    `run` is the same for the workers of one generation, and tells it from other runs of a job of this name.
    `stall_s`: of a step, in which the training waited for results. `step_s` and `stall_s` are means since the figures
    before.
    """

    job: str
    run: str
    rank: int
    world_size: int
    generation: int
    host: str
    pid: int
    written_at: float  # seconds since 1970
    step: int
    step_s: float
    stall_s: float
    stalled_total_s: float
    bytes_sent: int  # over the network
    bytes_received: int
    plain_bytes_sent: int  # what these two would be without coding
    plain_bytes_received: int
    layers: tuple[LayerFigures, ...]  # in the order of backward
    links: tuple[LinkFigures, ...]

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> WorkerFigures:
        """What `dataclasses.asdict` has made plain data. Raises ValueError or TypeError for what it has not made."""
        layers, links = content["layers"], content["links"]
        if not isinstance(layers, Sequence) or not isinstance(links, Sequence):
            raise TypeError("layers and links are lists")
        return cls(
            **_checked(cls, {name: value for name, value in content.items() if name not in ("layers", "links")}),
            layers=tuple(LayerFigures(**_checked(LayerFigures, layer)) for layer in layers),
            links=tuple(LinkFigures(**_checked(LinkFigures, link)) for link in links),
        )

    @property
    def run_key(self) -> tuple[str, str]:
        """What the workers of one run have in common: its job's name, and what tells it from others of this name."""
        return self.job, self.run

    @property
    def bytes_by_scheme(self) -> dict[str, int]:
        """Bytes that this worker sent and received in the step, by scheme."""
        sums: dict[str, int] = {}
        for layer in self.layers:
            sums[layer.scheme] = sums.get(layer.scheme, 0) + layer.bytes_sent + layer.bytes_received
        return sums

    @property
    def scalars(self) -> dict[str, float]:
        """The figures that are curves over a run, by name."""
        by_scheme = {f"poseidon/step_bytes/{scheme}": float(size) for scheme, size in self.bytes_by_scheme.items()}
        link = self.slowest_link
        rate = {} if link is None or link.bits_per_s is None else {"poseidon/slowest_link_bits_per_s": link.bits_per_s}
        return {"poseidon/step_seconds": self.step_s, "poseidon/stall_seconds": self.stall_s, **by_scheme, **rate}

    @property
    def slowest_link(self) -> LinkFigures | None:
        """The link with the lowest rate; None where no rate is known."""
        known = [link for link in self.links if link.bits_per_s is not None]
        return min(known, key=lambda link: link.bits_per_s or 0.0, default=None)


def _checked(kind: type, content: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a class of figures. Texts lose what would change a terminal, for anybody may have written them."""
    checked: dict[str, Any] = {}
    for one in fields(kind):
        if one.name not in content:
            continue  # the class says which one is missing
        value, words = content[one.name], str(one.type)
        if words == "str":
            if not isinstance(value, str):
                raise TypeError(f"{one.name} is no text")
            value = plain(value)
        elif value is not None or "None" not in words:
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(f"{one.name} is no number")
            value = int(value) if words == "int" else float(value)
        checked[one.name] = value
    if unknown := set(content) - set(checked):
        raise ValueError(f"unknown {', '.join(map(repr, sorted(unknown)))}")
    return checked


def plain(text: str) -> str:
    """The text without characters that change a terminal or a line."""
    return "".join(character if character.isprintable() else "?" for character in text)
