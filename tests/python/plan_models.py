"""Models of which plan and training are compared: parameters that no module's `forward` shows, or shows half."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

WIDTH = 32
EXPERTS = 4


class Kinds(nn.Module):
    """Each parameter is of another kind, or used in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(500, WIDTH)
        self.sparse = nn.Embedding(300, WIDTH, sparse=True)
        self.words = nn.Embedding(50, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.normed = weight_norm(nn.Linear(WIDTH, WIDTH))
        self.functional = nn.Linear(WIDTH, WIDTH, bias=False)
        self.both_ways = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.narrow = nn.Linear(WIDTH, 2 * WIDTH).bfloat16()
        self.wide = nn.Linear(2 * WIDTH, 8 * WIDTH)
        self.conv = nn.Conv1d(8 * WIDTH, WIDTH, 3, padding=1)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.phase = nn.Parameter(torch.ones(WIDTH, dtype=torch.complex64))
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.words.weight
        self.calls = 0

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        hidden = self.table(indices) + self.sparse(indices) + self.words(indices % 50)
        hidden = self.attention(hidden, hidden, hidden)[0] + hidden
        hidden = F.linear(self.normed(hidden), self.functional.weight)
        hidden = self.both_ways(hidden) + F.linear(hidden, self.both_ways.weight)
        self.calls += 1
        hidden = self.experts[3 * self.calls % EXPERTS](hidden)
        hidden = self.wide(self.narrow(hidden.bfloat16()).float())
        hidden = self.frozen(self.conv(hidden.transpose(1, 2)).transpose(1, 2))
        hidden = (hidden * self.scale).float() * (self.phase * self.phase.conj()).real
        return self.head(hidden)


def kinds() -> tuple[nn.Module, torch.Tensor]:
    """The model, and a batch whose rows every rank has."""
    torch.manual_seed(0)
    return Kinds(), torch.randint(0, 300, (2, 6))
