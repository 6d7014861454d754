"""`poseidon bench train`: replayed training with several methods, alternating in the same processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from poseidon.bench.hosts.fleet import Fleet, Place, hosts_on, make_barrier, start_fleet
from poseidon.bench.hosts.measures import step_seconds
from poseidon.bench.hosts.server import start_servers
from poseidon.bench.training.bound import least_step_seconds
from poseidon.bench.training.methods import Method, scaled_sizes
from poseidon.bench.training.results import MethodResult, TrainConfig, TrainResult
from poseidon.bench.training.traffic import dedicated_share
from poseidon.errors import InvalidArgument
from poseidon.launch import free_port

if TYPE_CHECKING:
    from poseidon.bench.training.host import Round

_FIRST_WARMUP = 2  # torch DDP orders its buckets and Poseidon learns factor counts in the first step
_NEXT_WARMUP = 1
_OVERLAP_WARMUP = 1  # more, until every step begins with the exchange that the one before has left


def run_training(config: TrainConfig, progress: Callable[[str, int, int], None] | None = None) -> TrainResult:
    """Measures all methods of `config` in one run. Needs root for a shaped link.

    `progress(method, rounds done, rounds in all)` is called before every round. Raises PoseidonError.
    """
    _check(config)
    # Torch is imported here, once, before the processes are forked; its store would warn of hosts without a name.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from poseidon.bench.training.connections import BUCKET_BYTES
    from poseidon.bench.training.host import HostSetup, TrainingHost

    # Every host of a testbed shares this machine's cores, so each multiplies factors with one thread. The bytes are
    # compared with those of the schemes that have the fewest, unless steps are to be as users have them.
    transport = "tcp" if config.workers_per_host == 1 else "auto"
    revise = "auto" if config.cold else "off"
    # Rounds without exchange leave every host with parameters of its own.
    options = {"compute_threads": 1, "transport": transport, "revise": revise, "replica_check": "off"}
    if config.link is not None and config.scale > 1:
        options["coding"] = "on"  # the messages that stand for large ones are small, and "auto" would not code them
    options |= _sizes_and_options(config)
    count = config.host_count + config.server_count
    with ExitStack() as stack:
        all_places, tcp_copy = stack.enter_context(hosts_on(count, config.link, mtu=config.mtu, **config.testbed))
        places = [place for place in all_places[: config.host_count] for _ in range(config.workers_per_host)]
        if config.server_count:
            options["servers"] = _start_servers(config, all_places[config.host_count :], options, stack)
        setup = HostSetup(
            table=config.table,
            unscaled=config.full_table.with_batch(config.batch),
            compute_seconds=config.compute_seconds,
            bucket_bytes=max(1, BUCKET_BYTES // config.scale**2),
            timeout_seconds=config.timeout_seconds,
            options=options,
        )
        port, lockstep = free_port(), make_barrier(config.worker_count)
        fleet = stack.enter_context(start_fleet(places, lambda rank: TrainingHost(setup, places, rank, port, lockstep)))
        rounds = _run_rounds(config, fleet, progress)
        fleet.call_same("close", timeout_seconds=config.timeout_seconds)
    return _summarize(config, rounds, tcp_copy)


def _check(config: TrainConfig) -> None:
    """Refuses methods whose bytes are not known with dedicated servers, or on a port that several workers share."""
    servers, each = config.server_count, config.workers_per_host
    if servers and config.host_count < 2:
        raise InvalidArgument(f"hosts is {config.host_count}: one worker exchanges nothing with dedicated servers")
    other = [method.name for method in config.methods if not method.all_through_ps]
    if servers and other:
        raise InvalidArgument(
            f"servers is {servers}: with dedicated servers only methods can be compared that send every "
            f"layer to the parameter server, such as wfbp-ps and overlap-ps; {', '.join(other)} may not"
        )
    if each > 1 and (servers or config.host_count < 2):
        raise InvalidArgument("several workers a host are measured on at least two hosts, without dedicated servers")
    if each > 1 and other:
        raise InvalidArgument(
            f"workers_per_host is {each}: only methods that send every layer to the parameter "
            f"server can be compared, such as wfbp-ps and overlap-ps; {', '.join(other)} may not"
        )


def _start_servers(config: TrainConfig, places: Sequence[Place], options: Mapping[str, Any], stack: ExitStack) -> str:
    """Dedicated servers that serve the jobs of all rounds. Returns their addresses as the option `servers`.

    `options` are the workers'.
    """
    shared = {"priority_classes": str(config.options.get("priority_classes", 1))}
    shared |= {"coding": options["coding"]} if "coding" in options else {}
    return ",".join(start_servers(places, shared, config.timeout_seconds, stack)[1])


def _sizes_and_options(config: TrainConfig) -> dict[str, Any]:
    return {**scaled_sizes(config.scale), **config.options}


def _run_rounds(
    config: TrainConfig, fleet: Fleet, progress: Callable[[str, int, int], None] | None
) -> dict[str, list[list[Round]]]:
    """Returns every method's rounds. A round is one `Round` per host.

    The methods take turns, so that a drift of the machine meets all of them.
    """
    rounds: dict[str, list[list[Round]]] = {method.name: [] for method in config.methods}
    done = 0
    for repeat in range(config.repeat_count):
        for method in config.methods:
            if progress is not None:
                progress(method.name, done, config.repeat_count * len(config.methods))
            warmup = (_NEXT_WARMUP if repeat else _FIRST_WARMUP) + (_OVERLAP_WARMUP if method.overlap else 0)
            if config.cold and method.library != "none":
                warmup = 0
            steps = config.step_count
            if method.every > 1:  # whole periods, so that each has its averaging
                warmup, steps = method.every, -(-steps // method.every) * method.every
            arguments = (method.scaled(config.scale), warmup, steps, free_port(), config.cold)
            # The library's own timeout comes first, so that its error says what happened.
            limit = config.timeout_seconds * (warmup + steps) + 60
            rounds[method.name].append(fleet.call_same("run_round", *arguments, timeout_seconds=limit))
            done += 1
    return rounds


def _summarize(config: TrainConfig, rounds: dict[str, list[list[Round]]], tcp_copy: float | None) -> TrainResult:
    full = config.full_table
    seconds = {
        name: [duration for hosts in repeats for duration in step_seconds([host.ends for host in hosts])]
        for name, repeats in rounds.items()
    }
    without_exchange = median(seconds["none"])
    results = []
    for method in config.methods:
        takes_mean = method.every > 1 or (config.cold and method.library != "none")
        iteration = mean(seconds[method.name]) if takes_mean else median(seconds[method.name])
        efficiency = without_exchange / iteration
        layer_bytes = _layer_bytes(config, method)
        sharers = _sharers(config, method)
        counted_steps = sum(hosts[0].counted_steps for hosts in rounds[method.name])
        by_host = [
            sum(hosts[rank].interface.total for hosts in rounds[method.name]) / counted_steps / sharers
            for rank in range(config.worker_count)
        ]
        plain, coded = _payload_bytes(rounds[method.name], config.host_count * counted_steps)
        results.append(
            MethodResult(
                method=method.name,
                step_seconds=seconds[method.name],
                iteration_seconds=iteration,
                efficiency=efficiency,
                speedup=config.worker_count * efficiency,
                samples_per_second=config.worker_count * efficiency * full.batch / full.iteration_seconds,
                closed_form_bytes=sum(layer_bytes),
                payload_bytes=plain,
                interface_bytes=sum(by_host) / config.worker_count,
                interface_bytes_max=max(by_host),
                bound_seconds=_bound_seconds(
                    config, method, [size * _share(plain, coded) for size in layer_bytes], without_exchange, tcp_copy
                ),
                coded_bytes=coded,
            )
        )
    return TrainResult(
        model=full.name,
        hosts=config.host_count,
        link=config.link,
        scale=config.scale,
        compute_seconds=config.compute_seconds,
        parameter_count=config.table.parameter_count,
        batch=config.table.batch,
        tcp_copy_bits_per_second=tcp_copy,
        methods=results,
        device=config.device,
        testbed=config.testbed,
        servers=config.server_count,
        workers_per_host=config.workers_per_host,
    )


def _payload_bytes(repeats: list[list[Round]], count: int) -> tuple[float | None, float | None]:
    """What Poseidon counts, without coding and as it travels, over `count`; None for other methods."""
    payloads = [host.payload for hosts in repeats for host in hosts if host.payload is not None]
    if not payloads:
        return None, None
    return sum(one.plain.total for one in payloads) / count, sum(one.sent.total for one in payloads) / count


def _share(plain: float | None, coded: float | None) -> float:
    return coded / plain if plain and coded else 1.0


def _sharers(config: TrainConfig, method: Method) -> int:
    """How many ends' bytes the interface of a host counts: on loopback those of all workers and dedicated servers."""
    if config.link is not None:
        return 1
    # The servers together move what the workers move.
    return config.worker_count * (2 if _uses_servers(config, method) else 1)


def _uses_servers(config: TrainConfig, method: Method) -> bool:
    return config.server_count > 0 and method.library == "poseidon"


def _small_bytes(config: TrainConfig, method: Method) -> int:
    """The method's option of that name in this run."""
    return int({**_sizes_and_options(config), **method.scaled(config.scale).options}["small_bytes"])


def _layer_bytes(config: TrainConfig, method: Method) -> list[float]:
    scaled = method.scaled(config.scale)
    small_bytes = _small_bytes(config, method)
    workers, each = config.worker_count, config.workers_per_host
    if each > 1 and method.library == "poseidon" and scaled.options.get("reduce_by_host") != "off":
        return scaled.layer_bytes(config.table, config.host_count, small_bytes)
    layer_bytes = scaled.layer_bytes(config.table, workers, small_bytes)
    if each > 1 and method.library == "poseidon":  # all of the host's workers exchange with all that are elsewhere
        return [size * each * (workers - each) / (workers - 1) for size in layer_bytes]
    share = dedicated_share(config.host_count) if _uses_servers(config, method) else 1
    return [size * share for size in layer_bytes]


def _product_seconds(config: TrainConfig, method: Method) -> list[float]:
    """What the accelerator takes for each layer's product of received factors."""
    table = config.table
    rows = method.product_rows(table, config.worker_count, _small_bytes(config, method))
    return [
        count * forward / table.factor_count(layer) if count else 0.0
        for count, layer, (forward, _) in zip(rows, table.layers, table.durations(config.compute_seconds), strict=True)
    ]


def _bound_seconds(
    config: TrainConfig, method: Method, layer_bytes: list[float], without_exchange: float, tcp_copy: float | None
) -> float | None:
    """What the processes do beyond the replayed compute without exchange counts as updates."""
    if tcp_copy is None:
        return None
    if method.every > 1:
        exchange = sum(layer_bytes) / 2 * 8 / tcp_copy
        return max(without_exchange, exchange) if method.overlap_steps else without_exchange + exchange
    # A server's port carries what all workers move in both directions, shared by the servers.
    busiest = max(1.0, config.host_count / config.server_count) if _uses_servers(config, method) else 1.0
    return least_step_seconds(
        config.table,
        config.compute_seconds,
        max(0.0, without_exchange - config.compute_seconds),
        [size * busiest / 2 * 8 / tcp_copy for size in layer_bytes],
        _product_seconds(config, method),
        overlap=method.overlap,
    )
