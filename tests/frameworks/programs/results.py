"""What all programs share: where a rank leaves its trained model, and small data to train on."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch


def save(state: dict[str, torch.Tensor]) -> None:
    """Writes this rank's state dict into the folder that the program was given as its first argument."""
    torch.save({name: tensor.detach().clone() for name, tensor in state.items()}, file_of(int(os.environ["RANK"])))


def file_of(rank: int) -> Path:
    """Where `save` puts a rank's state dict."""
    return Path(sys.argv[1]) / f"rank{rank}.pt"


def text(length: int, symbols: int) -> torch.Tensor:
    """A sequence of tokens that can be learnt: each depends on the two before it, with a little noise."""
    generator = torch.Generator().manual_seed(7)
    noise = torch.rand(length, generator=generator)
    tokens = [1, 2]
    for position in range(2, length):
        following = (3 * tokens[-1] + tokens[-2] + 1) % symbols
        tokens.append(following if noise[position] < 0.9 else int(noise[position] * 1000) % symbols)
    return torch.tensor(tokens)


def images(count: int, classes: int, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures in three colours, each with a bright column where its class is."""
    generator = torch.Generator().manual_seed(11)
    labels = torch.randint(classes, (count,), generator=generator)
    pictures = 0.3 * torch.randn(count, 3, size, size, generator=generator)
    for picture, label in zip(pictures, labels, strict=True):
        picture[:, :, int(label) * size // classes] += 1.0
    return pictures, labels
