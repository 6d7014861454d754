"""What a run of `poseidon bench train` is to measure, and what it has measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from poseidon.bench.training.methods import Method
from poseidon.models import ModelTable, model_table, scaled


@dataclass(frozen=True)
class TrainConfig:
    """What one run measures.

    `link` is the rate of every port, such as "156mbit". With None the run is unshaped and on loopback. One iteration
    without exchange takes `compute_seconds`.

    `scale` divides both dimensions of every weight, and the batch. The sizes into which torch DDP and Poseidon cut what
    they send shrink with the weights, by its square. Headers do not shrink. `batch` is the number of images per worker
    before scaling, in place of the papers'. `compute_seconds` is what they take.

    Each host has `workers_per_host` workers, which share its port. What is said of a worker's bytes is then said of a
    port's.

    With `cold` the first step of each method counts, too, and Poseidon searches and revises as it does for users.

    `server_count` dedicated servers have hosts of their own. With 0 every worker hosts a shard. `mtu` is the number of
    bytes of the largest IP packet. `options` are more of `poseidon.init`. `device` is the one whose batch and images
    per second the papers give. `testbed` has more arguments of `Testbed`, which have no effect on loopback.
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
    cold: bool = False
    server_count: int = 0
    workers_per_host: int = 1
    mtu: int = 1500
    timeout_seconds: float = 300.0
    options: dict[str, Any] = field(default_factory=dict)
    device: str = "titan-x"
    testbed: dict[str, Any] = field(default_factory=dict)

    @property
    def worker_count(self) -> int:
        """The number of workers of all hosts."""
        return self.host_count * self.workers_per_host

    @property
    def full_table(self) -> ModelTable:
        """The layer table before scaling, with the papers' batch."""
        return model_table(self.model, self.device)

    @property
    def table(self) -> ModelTable:
        """The scaled layer table."""
        return scaled(self.full_table.with_batch(self.batch), self.scale)


@dataclass(frozen=True)
class MethodResult:
    """One method's part of a run. Times are in seconds; bytes are those of one worker and step, sent plus received.

    `step_seconds` has every measured step. A step lasts from when the slowest host ended the step before to when the
    slowest ended this one. `efficiency` is the median step without exchange over the median step with it. LocalSGD's
    `iteration_seconds` is the mean over whole periods instead, of which one step averages.
    `samples_per_second` is that of all hosts, at the full batch and the reported device's speed. What a sample is, the
    layer table says.

    `payload_bytes` is what Poseidon counts itself, as it is without coding, and `coded_bytes` as it travelled. Both are
    None for other methods. `interface_bytes` is what the ports
    count, with headers and acknowledgements. Both are means over the hosts. `interface_bytes_max` is that of the
    busiest host.

    No schedule of the method's bytes has a step shorter than `bound_seconds` (`bound.py`), where the ports carry what a
    plain TCP copy gets and updates take what they take without exchange. The bytes are those of the closed form, times
    `coded_share`. It is None without a shaped link.
    """

    method: str
    step_seconds: list[float]
    iteration_seconds: float
    efficiency: float
    speedup: float
    samples_per_second: float
    closed_form_bytes: float
    payload_bytes: float | None
    interface_bytes: float
    interface_bytes_max: float
    bound_seconds: float | None = None
    coded_bytes: float | None = None

    @property
    def coded_share(self) -> float | None:
        """What travels of each byte. None if Poseidon has not moved any."""
        return self.coded_bytes / self.payload_bytes if self.coded_bytes and self.payload_bytes else None

    @property
    def measured_bytes(self) -> float:
        """The payload, or the interface's bytes without one."""
        return self.interface_bytes if self.payload_bytes is None else self.payload_bytes

    @property
    def deviation(self) -> float | None:
        """By which fraction these deviate from the closed form. None if the closed form is 0."""
        return self.measured_bytes / self.closed_form_bytes - 1 if self.closed_form_bytes else None


@dataclass(frozen=True)
class TrainResult:
    """A whole run.

    Plain TCP copies get `tcp_copy_bits_per_second` on the same ports. It is None on loopback. There are
    `servers` dedicated servers.
    """

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
    servers: int = 0
    workers_per_host: int = 1

    def by_name(self, method: str) -> MethodResult:
        """Returns the result of one method."""
        return next(entry for entry in self.methods if entry.method == method)

    def step_efficiencies(self, entry: MethodResult) -> list[float]:
        """Returns the efficiency of each measured step, in their order."""
        without_exchange = self.by_name("none").iteration_seconds
        return [without_exchange / seconds for seconds in entry.step_seconds]

    def bound(self, entry: MethodResult) -> float | None:
        """Returns the efficiency that no schedule of the method's bytes can beat, or None without a shaped link."""
        if entry.bound_seconds is None:
            return None
        return self.by_name("none").iteration_seconds / entry.bound_seconds

    def of_bound(self, entry: MethodResult) -> float | None:
        """Returns how much of the speed that the bound allows the method reaches, or None without a shaped link."""
        return None if entry.bound_seconds is None else entry.bound_seconds / entry.iteration_seconds

    def to_json(self) -> dict[str, Any]:
        """Returns the result as `json.dump` takes it."""
        document = asdict(self)
        for entry, result in zip(document["methods"], self.methods, strict=True):
            entry.update(deviation=result.deviation, bound=self.bound(result), of_bound=self.of_bound(result))
            entry.update(coded_share=result.coded_share)
        return document
