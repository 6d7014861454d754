"""What a run of `poseidon bench train` is to measure, and what it has measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from poseidon.bench.training.methods import Method
from poseidon.models import ModelTable, model_table, scaled


@dataclass(frozen=True)
class TrainConfig:
    """What one run measures.

    link: rate of every port, such as "156mbit"; None runs unshaped on loopback. compute_seconds: of one iteration
    without exchange. scale: divisor of both dimensions of every weight and of the batch; the sizes into which torch
    DDP and Poseidon cut what they send shrink with the weights, by its square; headers do not. batch: images per
    worker before scaling, in place of the papers'; it changes K, not the compute time. mtu: bytes of the largest IP
    packet. options: more options of `poseidon.init`. device: whose times the papers' batch and images per second are.
    testbed: more arguments of `Testbed`, without effect on loopback.
    """

    model: str
    host_count: int
    link: str | None
    scale: int
    compute_seconds: float
    methods: tuple[Method, ...]
    step_count: int
    repeat_count: int
    batch: int | None = None
    mtu: int = 1500
    timeout_seconds: float = 300.0
    options: dict[str, Any] = field(default_factory=dict)
    device: str = "titan-x"
    testbed: dict[str, Any] = field(default_factory=dict)

    @property
    def full_table(self) -> ModelTable:
        """The layer table before scaling, with the papers' batch."""
        return model_table(self.model, self.device)

    @property
    def table(self) -> ModelTable:
        """The scaled layer table."""
        table = self.full_table
        return scaled(table if self.batch is None else replace(table, batch=self.batch), self.scale)


@dataclass(frozen=True)
class MethodResult:
    """One method's part of a run. Times in seconds, bytes of one worker and step, sent plus received.

    step_seconds: of every measured step, from when the slowest host ended the step before to when the slowest ended it.
    efficiency: the median step without exchange over the median step with it. images_per_second: of all hosts, at
    the full batch and the reported device's speed. payload_bytes: by Poseidon's own counters, None for other methods;
    interface_bytes: by the ports' counters, headers and acknowledgements included. Bytes are means over the hosts;
    interface_bytes_max is that of the busiest host.
    """

    method: str
    step_seconds: list[float]
    iteration_seconds: float
    efficiency: float
    speedup: float
    images_per_second: float
    closed_form_bytes: float
    payload_bytes: float | None
    interface_bytes: float
    interface_bytes_max: float

    @property
    def deviation(self) -> float | None:
        """Of the payload, or else of the interface's bytes, from the closed form, as a fraction; None without any."""
        measured = self.interface_bytes if self.payload_bytes is None else self.payload_bytes
        return measured / self.closed_form_bytes - 1 if self.closed_form_bytes else None


@dataclass(frozen=True)
class TrainResult:
    """A whole run. tcp_copy_bits_per_second: what plain TCP copies get on the same ports; None on loopback."""

    model: str
    hosts: int
    link: str | None
    scale: int
    compute_seconds: float
    parameter_count: int
    batch: int
    tcp_copy_bits_per_second: float | None
    methods: list[MethodResult]
    device: str = "titan-x"
    testbed: dict[str, Any] = field(default_factory=dict)

    def by_name(self, method: str) -> MethodResult:
        """The result of one method."""
        return next(entry for entry in self.methods if entry.method == method)

    def bound(self, entry: MethodResult) -> float | None:
        """The efficiency that no schedule of the method's bytes can beat; None without a shaped link.

        A step cannot be shorter than without exchange, nor than the bytes of one direction at a plain TCP copy's rate.
        """
        if self.tcp_copy_bits_per_second is None:
            return None
        without = self.by_name("none").iteration_seconds
        wire_seconds = entry.closed_form_bytes / 2 * 8 / self.tcp_copy_bits_per_second
        return without / max(without, wire_seconds)

    def to_json(self) -> dict[str, Any]:
        """Returns the result as `json.dump` takes it."""
        document = asdict(self)
        for entry, result in zip(document["methods"], self.methods, strict=True):
            entry.update(deviation=result.deviation, bound=self.bound(result))
        return document
