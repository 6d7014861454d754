"""`poseidon bench train`: replayed training with several methods, alternating in the same processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from poseidon.bench.fleet import LOOPBACK, Fleet, Place, make_barrier, places_of, start_fleet
from poseidon.bench.methods import Method, scaled_sizes
from poseidon.launch import free_port
from poseidon.models import ModelTable, model_table, scaled
from poseidon.testbed import Testbed

if TYPE_CHECKING:
    from poseidon.bench.worker import Round

_FIRST_WARMUP = 2  # torch DDP orders its buckets and Poseidon learns factor counts in the first step
_NEXT_WARMUP = 1
_OVERLAP_WARMUP = 1  # more, until every step begins with the exchange that the one before has left
_COPY_SECONDS = 1.5


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


def run_training(config: TrainConfig, progress: Callable[[str, int, int], None] | None = None) -> TrainResult:
    """Measures all methods of `config` in one run. Needs root for a shaped link.

    `progress(method, rounds done, rounds in all)` is called before every round. Raises PoseidonError.
    """
    # Torch is imported here, once, before the processes are forked; its store would warn of hosts without a name.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from poseidon.bench.exchange import BUCKET_BYTES
    from poseidon.bench.worker import Job, Worker

    job = Job(
        table=config.table,
        compute_seconds=config.compute_seconds,
        bucket_bytes=max(1, BUCKET_BYTES // config.scale**2),
        timeout_seconds=config.timeout_seconds,
        # Every host of a testbed shares this machine's cores, so each multiplies factors with one thread.
        options={**scaled_sizes(config.scale), "compute_threads": 1, "transport": "tcp", **config.options},
    )
    with hosts_on(config.host_count, config.link, mtu=config.mtu, **config.testbed) as (places, tcp_copy):
        port, lockstep = free_port(), make_barrier(config.host_count)
        with start_fleet(places, lambda rank: Worker(job, places, rank, port, lockstep)) as fleet:
            rounds = _run_rounds(config, fleet, progress)
            fleet.call_same("close", timeout_seconds=config.timeout_seconds)
    return _summarize(config, rounds, tcp_copy)


@contextmanager
def hosts_on(host_count: int, link: str | None, **testbed: Any) -> Iterator[tuple[list[Place], float | None]]:
    """Brings up the hosts; also gives the rate of plain TCP copies between them (bits/s). testbed: of `Testbed`.

    The rate is the slowest of copies from every host to the next, all at once; None on loopback or of one host.
    """
    if link is None:
        yield [LOOPBACK] * host_count, None
        return
    with Testbed(host_count, link, **testbed) as hosts:
        tcp_copy = None
        if host_count > 1:
            pairs = [(source, (source + 1) % host_count) for source in range(host_count)]
            tcp_copy = min(hosts.copy_rates(pairs, int(hosts.bits_per_second / 8 * _COPY_SECONDS)))
        yield places_of(hosts), tcp_copy


def _run_rounds(
    config: TrainConfig, fleet: Fleet, progress: Callable[[str, int, int], None] | None
) -> dict[str, list[list[Round]]]:
    """Every method's rounds; a round is one `Round` per host. The methods take turns, so that a drift of the machine
    meets all of them.
    """
    rounds: dict[str, list[list[Round]]] = {method.name: [] for method in config.methods}
    done = 0
    for repeat in range(config.repeat_count):
        for method in config.methods:
            if progress is not None:
                progress(method.name, done, config.repeat_count * len(config.methods))
            warmup = (_NEXT_WARMUP if repeat else _FIRST_WARMUP) + (_OVERLAP_WARMUP if method.overlap else 0)
            arguments = (method.scaled(config.scale), warmup, config.step_count, free_port())
            # The library's own timeout comes first, so that its error says what happened.
            limit = config.timeout_seconds * (warmup + config.step_count) + 60
            rounds[method.name].append(fleet.call_same("run_round", *arguments, timeout_seconds=limit))
            done += 1
    return rounds


def step_seconds(hosts: Sequence[Sequence[float]]) -> list[float]:
    """Durations of a round's steps from each host's ends of them: a step ends when the slowest host has ended it."""
    ends = [max(host[index] for host in hosts) for index in range(len(hosts[0]))]
    return [end - start for start, end in pairwise(ends)]


def _summarize(config: TrainConfig, rounds: dict[str, list[list[Round]]], tcp_copy: float | None) -> TrainResult:
    table = config.table
    full = config.full_table
    seconds = {
        name: [duration for hosts in repeats for duration in step_seconds([host.ends for host in hosts])]
        for name, repeats in rounds.items()
    }
    without_exchange = median(seconds["none"])
    # All hosts of a run on loopback share one interface, whose counters hold the bytes of every one of them.
    sharers = config.host_count if config.link is None else 1
    results = []
    for method in config.methods:
        efficiency = without_exchange / median(seconds[method.name])
        counted_steps = sum(hosts[0].counted_steps for hosts in rounds[method.name])
        by_host = [
            sum(hosts[rank].interface.total for hosts in rounds[method.name]) / counted_steps / sharers
            for rank in range(config.host_count)
        ]
        payloads = [host.payload.total for hosts in rounds[method.name] for host in hosts if host.payload is not None]
        results.append(
            MethodResult(
                method=method.name,
                step_seconds=seconds[method.name],
                iteration_seconds=median(seconds[method.name]),
                efficiency=efficiency,
                speedup=config.host_count * efficiency,
                images_per_second=config.host_count * efficiency * full.batch / full.iteration_seconds,
                closed_form_bytes=method.closed_form_bytes(table, config.host_count),
                payload_bytes=sum(payloads) / config.host_count / counted_steps if payloads else None,
                interface_bytes=sum(by_host) / config.host_count,
                interface_bytes_max=max(by_host),
            )
        )
    return TrainResult(
        model=full.name,
        hosts=config.host_count,
        link=config.link,
        scale=config.scale,
        compute_seconds=config.compute_seconds,
        parameter_count=table.parameter_count,
        batch=table.batch,
        tcp_copy_bits_per_second=tcp_copy,
        methods=results,
        device=config.device,
        testbed=config.testbed,
    )
