#!/usr/bin/env python3
"""The backend `poseidon` of torch.distributed against Gloo, in one run: `python bench/collectives.py`.

Each collective is called with float32 tensors of many sizes, alternately by both backends, whose ranks are the same
processes. Printed are the medians of the slowest rank's time for a call, and Gloo's time over Poseidon's: the median of
the rounds, and its 95 % interval. The bars: no cell is slower than Gloo (the upper end of its interval is at least
0.95), the middle of all cells is at least 1; on loopback from 1 MB on at least 1.3; on ports, all_reduce of 1 MB to 16
MB at least 0.97 of what the port allows.

    loopback   ranks of this machine over TCP, as if each had a machine of its own
    machine    ranks of this machine, over shared memory
    ports      a host for each rank, behind ports of 156 Mb/s; needs root
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

PLACES = ("loopback", "machine", "ports")
OPERATIONS = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "all_to_all_single")
SIZES = (8, 1 << 10, 16 << 10, 256 << 10, 1 << 20, 16 << 20, 256 << 20)
PORT_SIZES = (8, 16 << 10, 256 << 10, 1 << 20, 16 << 20)
PORT_MBIT = 156
PORT_BYTES_PER_S = PORT_MBIT * 1e6 / 8 * 1448 / 1514  # of what TCP carries in an Ethernet frame
ROUNDS = 9  # the 2nd and the 8th of which enclose the median with 96 %
TIMEOUT_S = 1800


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--places", default=",".join(PLACES))
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--operations", default=",".join(OPERATIONS))
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="bytes of the largest tensor")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return 0
    cells = []
    for place in args.places.split(","):
        for ranks in args.ranks.split(","):
            cells += run(place, ranks, args)
    return judge(cells)


def run(place: str, ranks: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The cells of one set of processes, which are printed as they come."""
    print(f"\n{place}, {ranks} ranks (bytes, µs of Gloo, µs of Poseidon, ratio)", flush=True)
    command = [sys.executable, "-m", "poseidon", "run", "-n", ranks]
    command += ["--link", f"{PORT_MBIT}mbit"] if place == "ports" else []
    command += [__file__, "--worker", "--places", place, "--operations", args.operations]
    command += ["--largest", str(args.largest)]
    environment = {**os.environ, **({"POSEIDON_TRANSPORT": "tcp"} if place == "loopback" else {})}
    cells = []
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            cell = {"place": place, "ranks": int(ranks), **json.loads(line)}
            low, high = cell["interval"]
            print(
                f"  {cell['operation']:24}{cell['bytes']:>12,}{1e6 * cell['gloo_s']:>12,.0f}"
                f"{1e6 * cell['poseidon_s']:>12,.0f}   {cell['ratio']:.2f} ({low:.2f} to {high:.2f})",
                flush=True,
            )
            cells.append(cell)
    if process.returncode:
        sys.exit(f"{place} with {ranks} ranks failed: its message is above")
    return cells


def judge(cells: list[dict[str, Any]]) -> int:
    """Prints each bar, and whether it is met. The exit status."""
    slower = [cell for cell in cells if cell["interval"][1] < 0.95]
    below = [cell for cell in cells if cell["place"] == "loopback" and cell["bytes"] >= 1 << 20 and cell["ratio"] < 1.3]
    middle = median(cell["ratio"] for cell in cells)
    shares = {name(cell): share_of_port(cell) for cell in cells if is_judged_by_port(cell)}
    short = [f"{what}: {share:.3f}" for what, share in shares.items() if share < 0.97]
    print(f"\nslower than Gloo (bar: none): {', '.join(map(name, slower)) or 'none'}")
    print(f"middle of {len(cells)} cells: {middle:.2f} (bar 1.0)")
    print(f"loopback from 1 MB on, below 1.3 (bar: none): {', '.join(map(name, below)) or 'none'}")
    if shares:
        print(f"share of the port, least {min(shares.values()):.3f} (bar 0.97), below: {', '.join(short) or 'none'}")
    return 1 if slower or below or short or middle < 1 else 0


def name(cell: dict[str, Any]) -> str:
    """Such as "all_reduce of 1,048,576 bytes (loopback, 4 ranks): 1.25"."""
    where = f"{cell['place']}, {cell['ranks']} ranks"
    return f"{cell['operation']} of {cell['bytes']:,} bytes ({where}): {cell['ratio']:.2f}"


def is_judged_by_port(cell: dict[str, Any]) -> bool:
    """Whether it is an all-reduce whose time the port should make."""
    return cell["place"] == "ports" and cell["operation"] == "all_reduce" and cell["bytes"] >= 1 << 20


def share_of_port(cell: dict[str, Any]) -> float:
    """The time that a port needs for the bytes, if nothing is coded, over that which the call took."""
    ranks = cell["ranks"]
    return float(2 * (ranks - 1) / ranks * cell["bytes"] / PORT_BYTES_PER_S / cell["poseidon_s"])


def work(args: argparse.Namespace) -> None:
    """Measures as one rank. The first one prints a line for each cell."""
    import torch
    import torch.distributed as dist

    import poseidon.torch  # noqa: F401  # registers the backend

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {"gloo": dist.group.WORLD, "poseidon": dist.new_group(backend="poseidon")}
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sizes = [size for size in (PORT_SIZES if args.places == "ports" else SIZES) if size <= args.largest]
    for operation in args.operations.split(","):
        for size in sizes:
            call, reset = prepared(operation, size, ranks)
            seconds: dict[str, list[float]] = {name: [] for name in groups}
            for group in groups.values():
                call(group)
            times = repetitions(call, groups["gloo"])
            for number in range(ROUNDS):
                order = list(groups) if number % 2 else list(groups)[::-1]
                for name_of_group in order:
                    reset()
                    dist.barrier()
                    begun = time.perf_counter()
                    for _ in range(times):
                        call(groups[name_of_group])
                    slowest = torch.tensor([(time.perf_counter() - begun) / times])
                    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                    seconds[name_of_group].append(slowest.item())
            ratios = sorted(a / b for a, b in zip(seconds["gloo"], seconds["poseidon"], strict=True))
            if rank == 0:
                cell: dict[str, Any] = {"operation": operation, "bytes": size, "ratio": median(ratios)}
                cell["interval"] = [ratios[1], ratios[-2]]
                cell.update({f"{one}_s": median(found) for one, found in seconds.items()})
                print(json.dumps(cell), flush=True)
    dist.destroy_process_group()


def repetitions(call: Callable[[Any], Any], group: Any) -> int:
    """How often a call is made in a round, the same on all ranks: about a tenth of a second."""
    import torch
    import torch.distributed as dist

    begun = time.perf_counter()
    call(group)
    taken = torch.tensor([time.perf_counter() - begun])
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return max(1, min(30, int(0.1 / taken.item())))


def prepared(operation: str, size: int, ranks: int) -> tuple[Callable[[Any], Any], Callable[[], Any]]:
    """A call of the operation on tensors of so many bytes in all, and what makes its values as they were."""
    import torch
    import torch.distributed as dist

    count = max(1, size // 4 // ranks) * ranks
    values = torch.randn(count)
    whole, part, other = values.clone(), torch.randn(count // ranks), torch.empty(count)
    calls: dict[str, Callable[[Any], Any]] = {
        "all_reduce": lambda group: dist.all_reduce(whole, group=group),
        "broadcast": lambda group: dist.broadcast(whole, 0, group=group),
        "all_gather_into_tensor": lambda group: dist.all_gather_into_tensor(other, part, group=group),
        "reduce_scatter_tensor": lambda group: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_to_all_single": lambda group: dist.all_to_all_single(other, whole, group=group),
    }
    return calls[operation], lambda: whole.copy_(values)


if __name__ == "__main__":
    sys.exit(main())
