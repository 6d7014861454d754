"""Fully connected layers under each scheme that `auto` may choose for them: time and bytes of one step.

Each worker has K rows of factors of each layer, and their product for `ps`. The schemes take turns, step by step, in
the same processes. A time is that of the slowest worker, from the start of the exchange until the mean is there.
Bytes are those that one machine sends plus receives. The gain is the time of the better of ps and sfb over that of
sharded_factors. All workers must have the same bits, and sharded_factors those of sfb.

    python bench/factor_schemes.py --hosts 16 --scale 8                  # root and iproute2
    python bench/factor_schemes.py --layers 4096x4096x64 --servers 8     # dedicated servers on hosts of their own
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from poseidon import _core
from poseidon.bench.hosts.fleet import Fleet, Place, hosts_on, start_fleet
from poseidon.bench.hosts.server import ServerHost, settings_on
from poseidon.launch import free_port
from poseidon.schemes import SCHEMES

TIMEOUT_S = 600.0
FLOAT_BYTES = 4
METHODS = tuple(name for name, scheme in SCHEMES.items() if scheme.automatic and not scheme.takes_rows)
LAYERS = ("4096x25088x512", "32000x1024x256")  # VGG's fc6, and the head of a classifier


@dataclass(frozen=True)
class Shape:
    """A layer: M × N, and K of one worker."""

    rows: int
    cols: int
    factor_count: int

    @classmethod
    def parse(cls, text: str, scale: int) -> Shape:
        """Reads text such as 4096x25088x512. `scale` divides all three, and so all bytes by its square."""
        rows, cols, factor_count = (int(number) // scale for number in text.split("x"))
        return cls(rows, cols, factor_count)

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}, K = {self.factor_count}"


class Host:
    """One worker. Its client has each layer once for each scheme."""

    def __init__(self, args: argparse.Namespace, places: Sequence[Place], rank: int, port: int, servers: str) -> None:
        settings = settings_on(
            places[rank],
            {"servers": servers} if servers else {},
            rank=rank,
            world_size=len(places),
            local_rank=rank,
            local_world_size=len(places),  # they share this machine's cores
            master_addr=places[0].address,
            master_port=port,
            timeout=TIMEOUT_S,
            chunk_bytes=2 << 20,
        )
        self._worker_count, self._shapes = len(places), args.shapes
        random = np.random.default_rng(rank)
        sizes = [(shape.factor_count, side) for shape in args.shapes for side in (shape.rows, shape.cols)]
        self._factors = [random.standard_normal(size, dtype=np.float32) for size in sizes]
        self._client = _core.Client.connect(settings.core())
        layers = [
            _core.Layer(f"{scheme} {index}", "float32", shape.rows * shape.cols, shape.rows, shape.cols, scheme=scheme)
            for index, shape in enumerate(args.shapes)
            for scheme in METHODS
        ]
        self._first, _ = self._client.add_layers(layers)

    def step(self, index: int, scheme: str) -> tuple[float, float, int, str]:
        """Returns the times of start and end, the bytes that were moved, and a hash of the result."""
        shape = self._shapes[index]
        left, right = self._factors[2 * index : 2 * index + 2]
        result = np.empty((shape.rows, shape.cols), np.float32)
        layer = self._first + index * len(METHODS) + METHODS.index(scheme)
        if not SCHEMES[scheme].takes_factors:
            np.matmul(left.T, right, out=result)
        before, start = self._moved_bytes(), time.monotonic()
        if SCHEMES[scheme].takes_factors:
            self._client.start_factors(layer, [left], [right], result, self._worker_count)
        else:
            self._client.start(layer, result, self._worker_count, shape.factor_count)
        self._client.wait_all()
        end = time.monotonic()
        return start, end, self._moved_bytes() - before, hashlib.sha256(result.tobytes()).hexdigest()

    def close(self) -> None:
        """Ends the connections."""
        self._client.shutdown()

    def _moved_bytes(self) -> int:
        traffic = self._client.traffic()
        return int(traffic.bytes_sent + traffic.bytes_received)


def measure_layer(args: argparse.Namespace, fleet: Fleet, index: int) -> dict[str, dict[str, float]]:
    """The median time and the bytes of each scheme's steps; a first step of each is not counted."""
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    moved: dict[str, int] = {}
    bits: dict[str, set[str]] = {}
    for number in range(args.steps + 1):
        for method in METHODS:
            answers = fleet.call_same("step", index, method, timeout_seconds=TIMEOUT_S)
            bits[method] = {digest for *_, digest in answers}
            moved[method] = max(count for _, _, count, _ in answers)
            if number > 0:
                seconds[method].append(max(end for _, end, *_ in answers) - min(start for start, *_ in answers))
    if any(len(digests) > 1 for digests in bits.values()):
        raise SystemExit(f"the workers have different bits: {bits}")
    if bits["sharded_factors"] != bits["sfb"]:
        raise SystemExit("sharded_factors has other bits than sfb")
    shape, cluster = args.shapes[index], args.cluster
    results = {}
    for method in METHODS:
        cost = _core.scheme_cost(method, shape.rows, shape.cols, shape.factor_count, cluster)
        closed_form = FLOAT_BYTES * (cost.worker if args.servers else cost.server_and_worker)
        results[method] = {"seconds": median(seconds[method]), "bytes": moved[method], "closed_form": closed_form}
    return results


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures all layers. Returns one entry for each."""
    entries = []
    with ExitStack() as stack:
        places, _ = stack.enter_context(hosts_on(args.hosts + args.servers, args.link))
        workers, own = places[: args.hosts], places[args.hosts :]
        addresses = ""
        if own:
            build = lambda rank: ServerHost(own[rank], {}, len(own), TIMEOUT_S)  # noqa: E731
            ports = stack.enter_context(start_fleet(own, build)).call_same("port", timeout_seconds=TIMEOUT_S)
            addresses = ",".join(f"{host.address}:{port}" for host, port in zip(own, ports, strict=True))
        port = free_port()
        fleet = stack.enter_context(start_fleet(workers, lambda rank: Host(args, workers, rank, port, addresses)))
        for index, shape in enumerate(args.shapes):
            results = measure_layer(args, fleet, index)
            layer = _core.Layer("weight", "float32", shape.rows * shape.cols, shape.rows, shape.cols)
            chosen = _core.best_scheme(layer, shape.factor_count, args.cluster)
            gain = min(results["ps"]["seconds"], results["sfb"]["seconds"]) / results["sharded_factors"]["seconds"]
            entries.append({"layer": str(shape), "auto": chosen, "gain": gain, "results": results})
        fleet.call_same("close", timeout_seconds=TIMEOUT_S)
    return entries


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=16, help="workers")
    parser.add_argument("--servers", type=int, default=0, help="dedicated servers on further hosts; 0: on the workers")
    parser.add_argument("--link", default="25mbit", help="rate of every port")
    parser.add_argument("--layers", nargs="+", default=LAYERS, metavar="MxNxK")
    parser.add_argument("--scale", type=int, default=1, help="divides M, N and K")
    parser.add_argument("--steps", type=int, default=3, help="steps of each scheme that count")
    parser.add_argument("--json", action="store_true", help="print JSON to standard output")
    args = parser.parse_args()
    args.shapes = [Shape.parse(text, args.scale) for text in args.layers]
    args.cluster = _core.Cluster(args.hosts, args.servers or args.hosts, "dedicated" if args.servers else "colocated")
    return args


def main() -> None:
    args = parse_arguments()
    entries = run(args)
    if args.json:
        print(json.dumps(entries, indent=2))
        return
    for entry in entries:
        print(f"{entry['layer']}: gain {entry['gain']:.2f}, auto takes {entry['auto']}")
        for method, result in entry["results"].items():
            excess = result["bytes"] / result["closed_form"] - 1
            print(
                f"  {method:<16} {result['seconds']:8.3f} s  {result['bytes'] / 1e6:9.3f} MB per machine, "
                f"closed form {result['closed_form'] / 1e6:9.3f} MB ({100 * excess:+.2f} %)"
            )


if __name__ == "__main__":
    main()
