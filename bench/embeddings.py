"""The gradients of DLRM's embeddings: as rows and as dense arrays, by Poseidon and by torch's DDP.

Each worker clicks by Zipf's law into every table and runs a backward pass. The methods take turns, step by step, in the
same processes. A time is that of the slowest worker's forward and backward pass, at whose end the mean is in `.grad`.
Bytes are those that the port of one host sends plus receives, with all headers; on loopback they are not known.

    rows        Poseidon, sparse gradients        ddp         torch's DDP, sparse gradients
    touched     Poseidon, dense gradients         ddp-dense   torch's DDP, dense gradients
    dense       the same with scheme ps

Each bar needs two of the methods. The exit status is 1 if one is missed. All methods take about 1 GB a host.

    python bench/embeddings.py --hosts 8 --link 156.25mbit   # root and iproute2; --link none: loopback, unshaped
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from statistics import median

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the store warns of hosts without a name

import torch
import torch.distributed as dist
from torch import nn

import poseidon.torch as poseidon
from poseidon.bench.hosts.fleet import Fleet, Place, hosts_on, start_fleet
from poseidon.bench.hosts.measures import interface_counters
from poseidon.launch import free_port

TIMEOUT_S = 300.0
METHODS = ("rows", "ddp", "touched", "dense", "ddp-dense")
BYTES_BAR = 0.01  # rows over dense, in bytes
SPARSE_BAR = 1.0  # ddp over rows, in time
DENSE_BAR = 20.0  # ddp-dense over rows, in time

Steps = dict[str, list[float]]  # by method


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
        self._interface = places[rank].interface
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
        """Returns the times of start and end, and the bytes that the port has moved."""
        generator = torch.Generator().manual_seed(number * 1000 + self._rank)
        draws = torch.rand(self._args.tables, self._args.clicks, generator=generator, dtype=torch.float64)
        clicks = torch.searchsorted(self._chances, draws).clamp(max=self._args.rows - 1)
        model = self._models[method]
        dist.barrier()
        before, start = interface_counters(self._interface), time.monotonic()
        model(clicks).backward()
        end = time.monotonic()
        dist.barrier()
        moved = interface_counters(self._interface) - before
        model.zero_grad(set_to_none=True)  # the methods take turns with the memory, too
        return start, end, moved.total

    def close(self) -> None:
        """Ends the connections."""
        self._models.clear()
        poseidon.shutdown()
        dist.destroy_process_group()

    def _wrap(self, method: str) -> nn.Module:
        model = Tables(self._args, sparse=method in ("rows", "ddp"))
        if method.startswith("ddp"):
            return nn.parallel.DistributedDataParallel(model, init_sync=False)
        scheme = "ps" if method == "dense" else "auto"
        return poseidon.DistributedDataParallel(model, scheme=scheme, init_sync=False)


def measure(args: argparse.Namespace, fleet: Fleet) -> tuple[Steps, Steps]:
    """The seconds and the bytes of each method's steps; a first step of each is not counted."""
    seconds: Steps = {method: [] for method in args.methods}
    moved: Steps = {method: [] for method in args.methods}
    for number in range(max(args.steps, args.dense_steps) + 1):
        for method in args.methods:
            if number > (args.dense_steps if "dense" in method else args.steps):
                continue
            answers = fleet.call_same("step", method, number, timeout_seconds=TIMEOUT_S)
            if number == 0:
                continue
            seconds[method].append(max(end for _, end, _ in answers) - min(start for start, _, _ in answers))
            moved[method].append(max(count for _, _, count in answers))
    return seconds, moved


def judge(seconds: Steps, moved: Steps, knows_bytes: bool) -> list[tuple[str, bool]]:
    """A line for each bar whose methods were measured, and whether it was met."""
    lines = []
    if {"rows", "dense"} <= seconds.keys() and knows_bytes:
        share = median(moved["rows"]) / median(moved["dense"])
        lines.append((f"bytes of rows over dense: {share:.3%}, bar {BYTES_BAR:.0%}", share <= BYTES_BAR))
    for other, bar in (("ddp", SPARSE_BAR), ("ddp-dense", DENSE_BAR)):
        if {"rows", other} <= seconds.keys():
            # Each pair is of one turn, so that what else the machine does is in both.
            ratio = median(theirs / ours for theirs, ours in zip(seconds[other], seconds["rows"], strict=False))
            lines.append((f"time of {other} over rows: {ratio:.2f}, bar {bar:.2f}", ratio >= bar))
    return lines


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--link", default="156.25mbit", help="rate of every port; none: loopback, unshaped")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--tables", type=int, default=4)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of each table")
    parser.add_argument("--width", type=int, default=16, help="columns of each table")
    parser.add_argument("--clicks", type=int, default=1024, help="of each worker into each table and step")
    parser.add_argument("--exponent", type=float, default=1.05, help="of Zipf's law")
    parser.add_argument("--steps", type=int, default=15, help="steps of rows, ddp and touched that count")
    parser.add_argument("--dense-steps", type=int, default=1, help="steps of the others that count; each takes long")
    parser.add_argument("--json", action="store_true", help="print JSON to standard output")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    torch.set_num_threads(1)  # before any work: the workers are forked, and threads do not survive that
    with hosts_on(args.hosts, None if args.link == "none" else args.link) as (places, _):
        ports = (free_port(), free_port())
        with start_fleet(places, lambda rank: Host(args, places, rank, ports)) as fleet:
            seconds, moved = measure(args, fleet)
            fleet.call_same("close", timeout_seconds=TIMEOUT_S)
    bars = judge(seconds, moved, knows_bytes=args.link != "none")
    if args.json:
        print(json.dumps({**vars(args), "seconds": seconds, "bytes": moved, "bars": bars}, indent=2))
    else:
        for method in args.methods:
            note = "" if args.link == "none" else f"  {median(moved[method]) / 1e6:10.3f} MB on a port"
            print(f"{method:<9} {1e3 * median(seconds[method]):10.1f} ms{note}")
        for line, met in bars:
            print(f"{line}: {'met' if met else 'missed'}")
    return 0 if all(met for _, met in bars) else 1


if __name__ == "__main__":
    raise SystemExit(main())
