"""AdamW as servers compute it, against torch's fused AdamW on the same core.

Both update the same number of float32 parameters with one thread, in turns. Each figure is the best of many calls, and
the ratio is the median over the rounds. The exit status is 1 if the servers' update is slower.

    make core-bench && python bench/adamw.py
"""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from pathlib import Path
from statistics import median

import torch

BAR = 1.0


def torch_ns(element_count: int, seconds: float = 0.5) -> float:
    """Nanoseconds in which torch's fused AdamW updates one parameter."""
    parameter = torch.nn.Parameter(torch.full((element_count,), 1e-3))
    parameter.grad = torch.full((element_count,), 1e-3)
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=0.01, fused=True)
    calls_ns = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter_ns()
        optimizer.step()
        calls_ns.append(time.perf_counter_ns() - begin)
    return min(calls_ns) / element_count


def server_ns(program: Path, element_count: int) -> float:
    """The same for the servers' rule."""
    command = [str(program), "adamw", str(element_count)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).parent.parent / "build" / "bench" / "kernel_bench"
    parser.add_argument("--program", type=Path, default=default, help="the kernels' benchmark (make core-bench)")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    if not args.program.exists():
        parser.error(f"{args.program} is missing; run `make core-bench` first")
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    worst = float("inf")
    for count in (1 << 18, 1 << 20, 1 << 24):
        pairs = [(torch_ns(count), server_ns(args.program, count)) for _ in range(args.rounds)]
        ratio = median(ours / theirs for theirs, ours in pairs)
        theirs, ours = (median(column) for column in zip(*pairs, strict=True))
        worst = min(worst, 1 / ratio)
        print(f"{count:>9,} parameters: torch {theirs:.3f} ns each, servers {ours:.3f} ns, speed {1 / ratio:.2f}")
    print(f"least: {worst:.2f}; bar {BAR:.2f}: {'met' if worst >= BAR else 'missed'}")
    return 0 if worst >= BAR else 1


if __name__ == "__main__":
    raise SystemExit(main())
