"""`poseidon bench exchange`: the exchange alone, with infinitely fast compute (Parameter Hub §4.4).

Every round is a set of fresh processes that exchange with one method and nothing else, so that no method finds
another's memory, threads or connections. The methods take turns, so that a drift of the machine meets all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from poseidon.bench.exchange.engine import BenchmarkJob
from poseidon.bench.exchange.engines import missing_mpi
from poseidon.bench.exchange.host import LEAD_IN_STEPS, ExchangeHost
from poseidon.bench.exchange.methods import ExchangeMethod
from poseidon.bench.exchange.mpi_launch import start_mpi_fleet
from poseidon.bench.exchange.results import ExchangeConfig, ExchangeResult, Measured, summarize
from poseidon.bench.hosts.fleet import Fleet, Place, places_on, start_fleet
from poseidon.bench.hosts.server import START_SECONDS, UNCODED, start_servers
from poseidon.errors import InvalidArgument
from poseidon.launch import free_port
from poseidon.options import resolve

_WARMUP_STEPS = 2  # the second finds what the first left behind


def run_exchange(config: ExchangeConfig, progress: Callable[[str, int, int], None] | None = None) -> ExchangeResult:
    """Measures all methods of `config` in one run. Needs root for a shaped link.

    `progress(method, rounds done, rounds in all)` is called before every round. Raises PoseidonError.
    """
    if config.worker_count < 2:
        raise InvalidArgument(f"hosts is {config.worker_count}: an exchange needs at least 2")
    if config.port_count > 1 and config.link is None:
        raise InvalidArgument(f"ports is {config.port_count}: the loopback has one; give the rate of each with --link")
    skipped = {}
    if (reason := missing_mpi()) is not None:
        skipped = {method.name: reason for method in config.methods if method.library == "mpi"}
    methods = [method for method in config.methods if method.name not in skipped]
    _import_libraries(methods)
    rounds: dict[str, list[Measured]] = {method.name: [] for method in methods}
    total = config.repeat_count * len(methods)
    # The workers' hosts, then those of dedicated servers that have their own.
    count = config.placement.host_count(config.worker_count)
    network = {"mtu": config.mtu, "ports": config.port_count, **config.testbed}
    with places_on(count, config.link, **network) as (places, _):
        for index, method in enumerate(methods * config.repeat_count):
            if progress is not None:
                progress(method.name, index, total)
            rounds[method.name].append(_run_round(config, method, places))
    return summarize(config, methods, rounds, skipped)


def _import_libraries(methods: Sequence[ExchangeMethod]) -> None:
    """Imports once what the processes share when they are forked. Raises InvalidArgument for options that cannot be."""
    for method in methods:
        if method.library == "poseidon":
            resolve(rank=0, world_size=1, **method.options).core()
    if any(method.library == "gloo" for method in methods):
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its store would warn of hosts without a name
        import torch.distributed  # noqa: F401


def _run_round(config: ExchangeConfig, method: ExchangeMethod, places: Sequence[Place]) -> Measured:
    """Fresh processes meet, check the exchange, measure and end."""
    limit = config.timeout_seconds
    steps = LEAD_IN_STEPS + config.step_count
    with ExitStack() as stack:
        servers: Fleet | None = None
        addresses: tuple[str, ...] = ()
        if method.library == "poseidon":
            servers, addresses = _start_servers(config, method, places, stack)
        job = BenchmarkJob(
            method=method,
            tensors=config.workload.tensors,
            places=places[: config.worker_count],
            ports=[free_port() for _ in range(config.worker_count)],
            copy_bytes=round(config.placement.sent_bytes(config.workload.size_bytes, config.worker_count)),
            timeout_seconds=limit,
            servers=addresses,
        )
        workers = stack.enter_context(
            start_mpi_fleet(job.places, job)
            if method.library == "mpi"
            else start_fleet(job.places, lambda rank: ExchangeHost(job, rank))
        )
        workers.call_same("ready", timeout_seconds=START_SECONDS)
        # The library's own timeout comes first, so that its error says what happened.
        workers.call_same("prepare", _WARMUP_STEPS, timeout_seconds=limit * (1 + _WARMUP_STEPS) + START_SECONDS)
        before = _counted(servers)
        measured = workers.call_same("measure", config.step_count, timeout_seconds=limit * steps + START_SECONDS)
        server_cpu_seconds, server_timeouts = (now - then for now, then in zip(_counted(servers), before, strict=True))
        workers.call_same("close", timeout_seconds=limit)
        if servers is not None:
            servers.call_same("close", timeout_seconds=limit)
    return Measured(measured, server_cpu_seconds, int(server_timeouts))


def _start_servers(
    config: ExchangeConfig, method: ExchangeMethod, places: Sequence[Place], stack: ExitStack
) -> tuple[Fleet | None, tuple[str, ...]]:
    """The dedicated servers of the placement and their addresses; none where every worker hosts a shard."""
    count = config.placement.server_count(config.worker_count)
    if count == 0:
        return None, ()
    first = config.worker_count if config.placement.own_hosts else 0
    hosts = places[first : first + count]
    return start_servers(hosts, UNCODED | dict(method.options), config.timeout_seconds, stack)


def _counted(servers: Fleet | None) -> list[float]:
    """The sums of what the servers have counted so far."""
    counted = [] if servers is None else servers.call_same("counted", timeout_seconds=START_SECONDS)
    return list(map(sum, zip((0.0, 0), *counted, strict=True)))
