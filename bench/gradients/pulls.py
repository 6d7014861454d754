"""Prints how many bits a value of updated parameters takes as the difference from the one before, in real training.

The small GPT of the sample is trained by AdamW with the mean gradient of eight workers. As bf16, what counts is how the
float32 masters are rounded before and after a step (docs/coding.md).

    python bench/gradients/pulls.py     # some minutes
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from gradients.trainings import trainings
from poseidon.gradients.coded_bits import Format, difference_bits

WORKERS = 8
FORMS: tuple[Format, ...] = ("fp32", "bf16")
KINDS = ("embedding", "all others")


def rows(rate: float, steps: Sequence[int]) -> Iterator[tuple[str, ...]]:
    """A row for each step: the bits of the embedding and of all other parameters, in both formats."""
    torch.manual_seed(1)
    training, generator = trainings()["gpt"](), torch.Generator().manual_seed(3)
    optimizer = torch.optim.AdamW(training.model.parameters(), lr=rate)
    for step in range(max(steps) + 1):
        optimizer.zero_grad()
        for _ in range(WORKERS):
            (training.loss(training.model, training.batch(generator)) / WORKERS).backward()
        before = {name: one.detach().clone() for name, one in training.model.named_parameters()}
        optimizer.step()
        if step in steps:
            yield (f"{rate:g}", str(step), *(f"{bits:.1f}" for bits in _bits(training.model, before)))


def _bits(model: torch.nn.Module, before: dict[str, torch.Tensor]) -> Iterator[float]:
    for kind in KINDS:
        named = [(name, one) for name, one in model.named_parameters() if ("embedding" in name) == (kind == KINDS[0])]
        for form in FORMS:
            bits = sum(difference_bits(one.detach().numpy(), before[name].numpy(), form) for name, one in named)
            yield bits / sum(one.numel() for _, one in named)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", type=float, default=(1e-3, 1e-4, 1e-5))
    parser.add_argument("--steps", nargs="+", type=int, default=(0, 10, 40, 80))
    args = parser.parse_args()
    torch.set_num_threads(1)  # so that sums do not depend on the machine's cores
    header = ("learning rate", "step", *(f"{kind}, {form}" for kind in KINDS for form in FORMS))
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for rate in args.rates:
        for row in rows(rate, args.steps):
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
