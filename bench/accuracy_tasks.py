"""The trainings of accuracy.py: pictures, text and clicks, each with a small network that predicts a class."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import datasets
from transformer import LanguageModel, windows

CONTEXT = 32  # bytes that the language model looks at


@dataclass(frozen=True)
class Examples:
    """Inputs whose first dimensions agree, and the int64 classes to predict."""

    inputs: tuple[Tensor, ...]
    classes: Tensor

    def rows(self, index: Tensor | slice) -> Examples:
        """The examples at these places."""
        return Examples(tuple(part[index] for part in self.inputs), self.classes[index])


@dataclass(frozen=True)
class Task:
    """What one model is trained on. `batch` counts one worker's examples of a step."""

    title: str
    train: Examples
    test: Examples
    batch: int
    steps: int
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]


class Clicks(nn.Module):
    """DLRM in small: bags of categories, numbers through a perceptron, and the dot products of all their vectors."""

    def __init__(self, tables: int, rows: int, numbers: int, width: int = 16) -> None:
        super().__init__()
        weights = [0.1 * torch.randn(rows, width) for _ in range(tables)]
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum", _weight=weight) for weight in weights)
        self.bottom = nn.Sequential(nn.Linear(numbers, 64), nn.ReLU(), nn.Linear(64, width))
        self._upper = torch.triu_indices(tables + 1, tables + 1, offset=1)
        self.top = nn.Sequential(nn.Linear(width + self._upper.shape[1], 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        """`categories`: batch × tables × bag, row numbers. `numbers`: batch × numbers. Returns batch × 2 scores."""
        dense = self.bottom(numbers)
        bags = [table(categories[:, index]) for index, table in enumerate(self.tables)]
        vectors = torch.stack([dense, *bags], 1)
        products = (vectors @ vectors.transpose(1, 2))[:, self._upper[0], self._upper[1]]
        return self.top(torch.cat([dense, products], 1))


def pictures() -> Task:
    """A convolutional network on Fashion-MNIST, or on scikit-learn's digits where that cannot be had."""
    data = datasets.load()
    return Task(
        f"CNN on {data.name}",
        Examples((data.train_images,), data.train_labels),
        Examples((data.test_images[:4000],), data.test_labels[:4000]),
        batch=32,
        steps=320,
        model=_convolutional,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
    )


def text() -> Task:
    """A transformer of two layers that predicts the next byte of Python's help texts."""
    inputs, following = windows(CONTEXT)
    examples = Examples((inputs,), following)
    held_out = len(examples.classes) // 20
    return Task(
        "GPT on Python's help texts",
        examples.rows(slice(held_out, None)),
        examples.rows(slice(held_out)),
        batch=8,
        steps=320,
        model=lambda: LanguageModel(width=64, context=CONTEXT),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=2e-3),
    )


def clicks() -> Task:
    """A DLRM on clicks that a hidden rule makes: popular categories, numbers, and pairs of categories that match."""
    tables, rows, numbers, count, held_out = 4, 300, 4, 60_000, 4000
    generator = torch.Generator().manual_seed(7)
    categories = (rows * torch.rand(count, tables, 2, generator=generator) ** 3).long()  # low ones are popular
    values = torch.randn(count, numbers, generator=generator)
    tastes = torch.randn(tables, rows, 4, generator=generator)
    bags = torch.stack([tastes[index][categories[:, index]].sum(1) for index in range(tables)], 1)
    matches = (bags[:, 0] * bags[:, 1]).sum(1) + (bags[:, 2] * bags[:, 3]).sum(1)
    chances = torch.sigmoid(matches + values @ torch.randn(numbers, generator=generator))
    examples = Examples((categories, values), (torch.rand(count, generator=generator) < chances).long())
    return Task(
        "DLRM on synthetic clicks",
        examples.rows(slice(held_out, None)),
        examples.rows(slice(held_out)),
        batch=128,
        steps=320,
        model=lambda: Clicks(tables, rows, numbers),
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-2),
    )


TASKS: dict[str, Callable[[], Task]] = {"cnn": pictures, "gpt": text, "dlrm": clicks}


def _convolutional() -> nn.Module:
    first, second = nn.Conv2d(1, 8, 5, stride=2, padding=2), nn.Conv2d(8, 16, 3, stride=2, padding=1)
    head = [nn.Flatten(), nn.Linear(16 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10)]
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), *head)
