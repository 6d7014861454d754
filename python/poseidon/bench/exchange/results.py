"""What a run of `poseidon bench exchange` measured, and what it reports of that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from poseidon.bench.exchange.host import LEAD_IN_STEPS, Round
from poseidon.bench.exchange.methods import COPY, ExchangeMethod, Placement, Workload
from poseidon.bench.hosts.measures import step_seconds


@dataclass(frozen=True)
class ExchangeConfig:
    """What one run measures.

    `link` is the rate of every port, such as "156mbit". With None the run is unshaped and on loopback. Each host has
    `port_count` ports. More than one needs a link. `testbed` has more arguments of `Testbed`, which have no effect on
    loopback.
    """

    workload: Workload
    worker_count: int
    link: str | None
    placement: Placement
    methods: Sequence[ExchangeMethod]
    step_count: int
    repeat_count: int
    mtu: int = 1500
    timeout_seconds: float = 300.0
    port_count: int = 1
    testbed: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """A round: what the workers measured, and the processor time of the servers in the same steps."""

    workers: Sequence[Round]
    server_cpu_seconds: float
    server_timeouts: int

    @property
    def step_seconds(self) -> list[float]:
        """Durations of the measured steps."""
        return step_seconds([worker.ends for worker in self.workers])


@dataclass(frozen=True)
class ExchangeMethodResult:
    """One method's part of a run.

    `step_seconds` has every measured step. A step lasts from when the slowest worker ended the step before to when the
    slowest ended this one.

    `sent_bytes` is the payload that a host must send per step, by closed form (Placement). It receives as much.
    `goodput_bits_per_second` is that payload over the median step.

    `copy_ratio` is the goodput over that of the plain copy. `gloo_ratio` is Gloo's step time over this method's. Both
    are medians over the turns of the ratio within a turn, so that a slow drift of the machine cancels out. They are
    None if the other method was not measured.

    `cpu_seconds_per_gb` is the user and system time of all processes, servers included, per 10⁹ bytes of all workers'
    arrays.

    `memory_bytes` is by how much the exchange made a worker's resident memory grow at the end of the steps, less the
    shard that the worker hosts (S/P). It is that of the worker with the most. `memory_peak_bytes` is the same at the
    worst moment of the steps.

    `port_sent_bytes` is what each port of a worker's host sent per step, headers included, as the mean over the
    workers. It is empty on loopback, which the workers share.

    `timeouts` is how often the TCP of all hosts waited for a timer to send lost packets again, in all steps. It is None
    on loopback.
    """

    method: str
    options: dict[str, str]
    swept: str | None
    step_seconds: list[float]
    median_seconds: float
    sent_bytes: float
    goodput_bits_per_second: float
    copy_ratio: float | None
    gloo_ratio: float | None
    cpu_seconds_per_gb: float
    memory_bytes: int
    memory_peak_bytes: int
    port_sent_bytes: list[float] = field(default_factory=list)
    timeouts: int | None = None


@dataclass(frozen=True)
class ExchangeResult:
    """A whole run.

    `size_bytes` are those of all arrays of one worker. `skipped` names the methods that cannot run here, and says why.
    Each host has `ports` ports of the rate `link`.
    """

    model: str
    tensor_count: int
    size_bytes: int
    largest_tensor_bytes: int
    hosts: int
    link: str | None
    placement: str
    methods: list[ExchangeMethodResult]
    skipped: dict[str, str] = field(default_factory=dict)
    ports: int = 1
    testbed: dict[str, Any] = field(default_factory=dict)

    @property
    def network(self) -> str:
        """The hosts' ports, in words."""
        if self.link is None:
            return "loopback"
        return self.link if self.ports == 1 else f"{self.ports} × {self.link}"

    def to_json(self) -> dict[str, Any]:
        """Returns the result as `json.dump` takes it."""
        return asdict(self)


def summarize(
    config: ExchangeConfig,
    methods: Sequence[ExchangeMethod],
    rounds: Mapping[str, Sequence[Measured]],
    skipped: Mapping[str, str],
) -> ExchangeResult:
    """Returns the result of the rounds of each method, by its name."""
    workload = config.workload
    return ExchangeResult(
        model=workload.name,
        tensor_count=len(workload.tensors),
        size_bytes=workload.size_bytes,
        largest_tensor_bytes=workload.largest_bytes,
        hosts=config.worker_count,
        link=config.link,
        placement=config.placement.name,
        methods=[_summarize_method(config, method, rounds) for method in methods],
        skipped=dict(skipped),
        ports=config.port_count,
        testbed=dict(config.testbed),
    )


def _summarize_method(
    config: ExchangeConfig, method: ExchangeMethod, rounds: Mapping[str, Sequence[Measured]]
) -> ExchangeMethodResult:
    size_bytes, mine = config.workload.size_bytes, rounds[method.name]
    seconds = [duration for one in mine for duration in one.step_seconds]
    sent_bytes = method.sent_bytes(config.placement, size_bytes, config.worker_count)
    workers = [worker for one in mine for worker in one.workers]
    cpu = sum(worker.cpu_seconds for worker in workers) + sum(one.server_cpu_seconds for one in mine)
    steps_of_all = len(workers) * (LEAD_IN_STEPS + config.step_count)
    ports = zip(*(worker.port_sent_bytes for worker in workers), strict=True)
    embedded = method.library == "poseidon" and config.placement.server_count(config.worker_count) == 0
    shard_bytes = size_bytes // config.worker_count if embedded else 0
    faster_than_copy = _speed_ratio(mine, rounds.get(COPY))
    copy_bytes = config.placement.sent_bytes(size_bytes, config.worker_count)
    return ExchangeMethodResult(
        method=method.name,
        options=dict(method.options),
        swept=method.swept,
        step_seconds=seconds,
        median_seconds=median(seconds),
        sent_bytes=sent_bytes,
        goodput_bits_per_second=8 * sent_bytes / median(seconds),
        copy_ratio=None if faster_than_copy is None else faster_than_copy * sent_bytes / copy_bytes,
        gloo_ratio=_speed_ratio(mine, rounds.get("gloo")),
        cpu_seconds_per_gb=cpu / (steps_of_all * size_bytes / 1e9),
        memory_bytes=max(worker.grown_bytes for worker in workers) - shard_bytes,
        memory_peak_bytes=max(worker.peak_bytes for worker in workers) - shard_bytes,
        port_sent_bytes=[] if config.link is None else [sum(port) / steps_of_all for port in ports],
        timeouts=None if config.link is None else _timeouts(config, mine),
    )


def _timeouts(config: ExchangeConfig, rounds: Sequence[Measured]) -> int:
    """Of all hosts. A server on a worker's host shares that host's counter."""
    of_servers = sum(one.server_timeouts for one in rounds) if config.placement.own_hosts else 0
    return of_servers + sum(worker.timeouts for one in rounds for worker in one.workers)


def _speed_ratio(mine: Sequence[Measured], others: Sequence[Measured] | None) -> float | None:
    """How much faster a step is than the other method's in the same turn, in the median turn."""
    if others is None:
        return None
    return median(
        median(other.step_seconds) / median(one.step_seconds) for one, other in zip(mine, others, strict=True)
    )
