"""What wrapping a model costs when there is only one worker: wrapped against bare, step by step in turns.

The step is real computation, on the CPU on one thread, with a batch for which it takes about --step-ms. The result is
the median of the paired differences of neighbouring steps, as a share of the median bare step.

    python bench/overhead.py
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median

import torch
from torch import nn

import poseidon.torch as poseidon


class Subject:
    """A model, wrapped or not, with its optimizer."""

    def __init__(self, wrapped: bool, width: int, depth: int, device: torch.device) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU()) for _ in range(depth)]
        model = nn.Sequential(*layers).to(device)
        self.device = device
        self.module: nn.Module = poseidon.DistributedDataParallel(model) if wrapped else model
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-6, momentum=0.9)

    def step_seconds(self, batch: torch.Tensor) -> float:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        self.module(batch).square().mean().backward()
        self.optimizer.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start


def fitting_batch(subject: Subject, width: int, seconds: float) -> torch.Tensor:
    """Rows such that a step takes about `seconds`."""
    count = 16
    for _ in range(6):
        batch = torch.randn(count, width, device=subject.device)
        subject.step_seconds(batch)
        measured = median(subject.step_seconds(batch) for _ in range(5))
        if abs(measured / seconds - 1) < 0.05:
            break
        count = max(1, round(count * seconds / measured))
    return torch.randn(count, width, device=subject.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--steps", type=int, default=200, help="steps of each")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=16, help="blocks of Linear, LayerNorm and ReLU")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="cpu or cuda")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    torch.set_num_threads(1)
    poseidon.init(rank=0, world_size=1)
    bare, wrapped = (Subject(choice, args.width, args.depth, args.device) for choice in (False, True))
    batch = fitting_batch(bare, args.width, args.step_ms / 1e3)
    pairs = []
    for step in range(args.steps):
        # Whoever comes second may find warmer caches: they take turns in that, too.
        first, second = (bare, wrapped) if step % 2 == 0 else (wrapped, bare)
        seconds = {first: first.step_seconds(batch), second: second.step_seconds(batch)}
        pairs.append((seconds[bare], seconds[wrapped]))
    poseidon.shutdown()
    bare_seconds = median(before for before, _ in pairs)
    overhead = median(after - before for before, after in pairs) / bare_seconds
    if args.json:
        result = {"bare_seconds": bare_seconds, "overhead": overhead, "rows": len(batch), "steps": args.steps}
        print(json.dumps(result, indent=2))
    else:
        print(f"bare step {1e3 * bare_seconds:.2f} ms, overhead of wrapping {overhead:+.2%} ({args.steps} pairs)")


if __name__ == "__main__":
    main()
