"""The gradients of DLRM's embeddings: as rows, by torch's DDP with sparse gradients, and as dense arrays.

Each worker clicks by Zipf's law into every table and runs a backward pass. The methods take turns, step by step, in the
same processes. A time is that of the slowest worker's forward and backward pass, at whose end the mean is in `.grad`.
Bytes are those that one worker sends plus receives.

    python bench/embeddings.py --hosts 8 --link 1gbit        # root and iproute2; --link none: loopback, unshaped
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the store warns of hosts without a name

import torch
import torch.distributed as dist
from torch import nn

import poseidon.torch as poseidon
from poseidon.bench.hosts.fleet import Fleet, Place, hosts_on, start_fleet
from poseidon.launch import free_port
from poseidon.torch.process.context import context

TIMEOUT_S = 300.0
METHODS = ("rows", "ddp", "dense")


class Tables(nn.Module):
    """The sum over all tables of the rows that are clicked."""

    def __init__(self, args: argparse.Namespace, sparse: bool) -> None:
        super().__init__()
        shapes = [(args.rows, args.width)] * args.tables
        self.tables = nn.ModuleList(nn.Embedding(*shape, sparse=sparse, _weight=torch.zeros(shape)) for shape in shapes)

    def forward(self, clicks: torch.Tensor) -> torch.Tensor:
        """`clicks`: one line of row numbers for each table."""
        rows = torch.stack([table(line) for table, line in zip(self.tables, clicks, strict=True)])
        return ((rows + 1) ** 2).sum()


class Host:
    """One worker with a model for each method."""

    def __init__(self, args: argparse.Namespace, places: Sequence[Place], rank: int, ports: tuple[int, int]) -> None:
        self._args, self._rank = args, rank
        torch.set_num_threads(1)  # the hosts of a testbed share this machine's cores
        os.environ["GLOO_SOCKET_IFNAME"] = places[rank].interface
        store = dist.TCPStore(places[0].address, ports[0], len(places), is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=len(places))
        poseidon.init(
            rank=rank,
            world_size=len(places),
            master_addr=places[0].address,
            master_port=ports[1],
            timeout=TIMEOUT_S,
            compute_threads=1,
        )
        self._models = {method: self._wrap(method) for method in args.methods}
        weights = torch.arange(1, args.rows + 1, dtype=torch.float64).pow(-args.exponent)
        self._chances = weights.cumsum(0) / weights.sum()

    def step(self, method: str, number: int) -> tuple[float, float, int]:
        """Returns the times of start and end, and the bytes that Poseidon has moved."""
        generator = torch.Generator().manual_seed(number * 1000 + self._rank)
        draws = torch.rand(self._args.tables, self._args.clicks, generator=generator, dtype=torch.float64)
        clicks = torch.searchsorted(self._chances, draws).clamp(max=self._args.rows - 1)
        model = self._models[method]
        model.zero_grad(set_to_none=True)
        dist.barrier()
        before, start = self._moved_bytes(), time.monotonic()
        model(clicks).backward()
        end = time.monotonic()
        dist.barrier()
        return start, end, self._moved_bytes() - before

    def close(self) -> None:
        """Ends the connections."""
        self._models.clear()
        poseidon.shutdown()
        dist.destroy_process_group()

    def _wrap(self, method: str) -> nn.Module:
        model = Tables(self._args, sparse=method != "dense")
        if method == "ddp":
            return nn.parallel.DistributedDataParallel(model, init_sync=False)
        return poseidon.DistributedDataParallel(model, init_sync=False)

    def _moved_bytes(self) -> int:
        client = context().client
        if client is None:
            return 0
        traffic = client.traffic()
        return traffic.bytes_sent + traffic.bytes_received


def measure(args: argparse.Namespace, fleet: Fleet) -> dict[str, dict[str, float]]:
    """The median time and bytes of each method's steps; a first step of each is not counted."""
    seconds: dict[str, list[float]] = {method: [] for method in args.methods}
    moved: dict[str, list[float]] = {method: [] for method in args.methods}
    for number in range(args.steps + 1):
        for method in args.methods:
            answers = fleet.call_same("step", method, number, timeout_seconds=TIMEOUT_S)
            if number == 0:
                continue
            seconds[method].append(max(end for _, end, _ in answers) - min(start for start, _, _ in answers))
            moved[method].append(max(count for _, _, count in answers))
    return {one: {"seconds": median(seconds[one]), "bytes": median(moved[one])} for one in args.methods}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--link", default="1gbit", help="rate of every port; none: loopback, unshaped")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--tables", type=int, default=4)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of each table")
    parser.add_argument("--width", type=int, default=16, help="columns of each table")
    parser.add_argument("--clicks", type=int, default=1024, help="of each worker into each table and step")
    parser.add_argument("--exponent", type=float, default=1.05, help="of Zipf's law")
    parser.add_argument("--steps", type=int, default=5, help="steps of each method that count")
    parser.add_argument("--json", action="store_true", help="print JSON to standard output")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)  # before any work: the workers are forked, and threads do not survive that
    with hosts_on(args.hosts, None if args.link == "none" else args.link) as (places, _):
        ports = (free_port(), free_port())
        with start_fleet(places, lambda rank: Host(args, places, rank, ports)) as fleet:
            results: dict[str, Any] = measure(args, fleet)
            fleet.call_same("close", timeout_seconds=TIMEOUT_S)
    if args.json:
        print(json.dumps({**vars(args), "results": results}, indent=2))
        return
    for method, result in results.items():
        note = "" if method == "ddp" else f"  {result['bytes'] / 1e6:10.3f} MB per worker"
        print(f"{method:<6} {1e3 * result['seconds']:10.1f} ms{note}")


if __name__ == "__main__":
    main()
