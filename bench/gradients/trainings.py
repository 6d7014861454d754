"""The trainings whose gradients are sampled: six small networks on data that comes with Debian, Python or a package."""

from __future__ import annotations

import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradients import models

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import datasets

VOCABULARY, CONTEXT = 4096, 64
CLICK_ROWS, CLICK_EXPONENT = 50_000, 1.05

Batch = Callable[[torch.Generator], tuple[Tensor, ...]]
Loss = Callable[[nn.Module, tuple[Tensor, ...]], Tensor]


@dataclass
class Training:
    """`batch` draws one worker's examples of a step, and `loss` takes a model and such a batch."""

    family: str
    model: nn.Module
    batch: Batch
    loss: Loss
    optimizer: torch.optim.Optimizer


def trainings() -> dict[str, Callable[[], Training]]:
    """By the family of networks, in the order in which they must be trained: LoRA adapts the trained GPT."""
    gpt = cache(_gpt)
    return {"cnn": _cnn, "resnet": _resnet, "vit": _vit, "gpt": gpt, "lora": lambda: _lora(gpt()), "dlrm": _dlrm}


def kind_of(name: str, parameter: Tensor) -> str:
    """The kind of layer that a parameter of these models belongs to, by its name and dimensions."""
    if parameter.dim() == 1:
        return "vector"
    for kind in ("lora_a", "lora_b", "attention", "mlp", "embedding", "head", "fc"):
        if kind in name.split("."):
            return kind
    if parameter.dim() == 4:
        return "conv"
    return "positions" if parameter.dim() == 3 or "positions" in name else "head"


def _pictures(family: str, model: nn.Module, batch: int, optimizer: torch.optim.Optimizer) -> Training:
    data = _images()

    def draw(generator: torch.Generator) -> tuple[Tensor, ...]:
        places = torch.randint(len(data.train_labels), (batch,), generator=generator)
        return data.train_images[places], data.train_labels[places]

    return Training(
        family, model, draw, lambda net, drawn: functional.cross_entropy(net(drawn[0]), drawn[1]), optimizer
    )


@cache
def _images() -> datasets.Dataset:
    return datasets.load()


def _cnn() -> Training:
    model = models.Convolutional()
    return _pictures("cnn", model, 32, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9))


def _resnet() -> Training:
    model = models.residual_network()
    return _pictures("resnet", model, 32, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))


def _vit() -> Training:
    model = models.VisionTransformer()
    return _pictures("vit", model, 8, torch.optim.AdamW(model.parameters(), lr=3e-4))


def _language(family: str, model: nn.Module, text: Tensor, rate: float) -> Training:
    def draw(generator: torch.Generator) -> tuple[Tensor, ...]:
        places = torch.randint(len(text) - CONTEXT - 1, (4, 1), generator=generator) + torch.arange(CONTEXT + 1)
        return (text[places],)

    def loss(net: nn.Module, drawn: tuple[Tensor, ...]) -> Tensor:
        scores = net(drawn[0][:, :-1])
        return functional.cross_entropy(scores.flatten(0, 1), drawn[0][:, 1:].flatten())

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Training(family, model, draw, loss, torch.optim.AdamW(trained, lr=rate))


def _words(text: str) -> list[str]:
    return re.findall(r"\s?[A-Za-z]+|\s+|.", text)


@cache
def _texts() -> tuple[Tensor, Tensor]:
    """Python's help texts, and the sources of its library, as numbers of the most frequent words of both."""
    library = Path(sysconfig.get_path("stdlib"))
    sources = "".join(path.read_text(errors="replace") for path in sorted(library.glob("*.py"))[:60])
    pieces = [_words("".join(topics[name] for name in sorted(topics))), _words(sources)]
    known = [word for word, _ in Counter(pieces[0] + pieces[1]).most_common(VOCABULARY - 1)]
    numbers = {word: number for number, word in enumerate(known, start=1)}
    help_texts, code = (torch.tensor([numbers.get(word, 0) for word in part]) for part in pieces)
    return help_texts, code


def _gpt() -> Training:
    return _language("gpt", models.LanguageModel(VOCABULARY, CONTEXT), _texts()[0], 1e-3)


def _lora(trained: Training) -> Training:
    return _language("lora", models.with_adapters(trained.model), _texts()[1], 1e-3)


def _dlrm() -> Training:
    tables, numbers, clicks = 4, 13, 1024
    chances = torch.arange(1, CLICK_ROWS + 1, dtype=torch.float64).pow(-CLICK_EXPONENT).cumsum(0)
    rule = torch.Generator().manual_seed(7)
    tastes = torch.randn(tables, CLICK_ROWS, 4, generator=rule)
    weights = torch.randn(numbers, generator=rule)
    order = torch.stack([torch.randperm(CLICK_ROWS, generator=rule) for _ in range(tables)])

    def draw(generator: torch.Generator) -> tuple[Tensor, ...]:
        draws = torch.rand(tables, clicks, generator=generator, dtype=torch.float64) * chances[-1]
        ranks = torch.searchsorted(chances, draws).clamp(max=CLICK_ROWS - 1)
        categories = order.gather(1, ranks)
        values = torch.randn(clicks, numbers, generator=generator)
        liked = [tastes[index][categories[index]] for index in range(tables)]
        odds = (liked[0] * liked[1]).sum(1) + (liked[2] * liked[3]).sum(1) + values @ weights
        return categories.T, values, (torch.rand(clicks, generator=generator) < odds.sigmoid()).float()

    def loss(net: nn.Module, drawn: tuple[Tensor, ...]) -> Tensor:
        return functional.binary_cross_entropy_with_logits(net(*drawn[:2]), drawn[2])

    model = models.Clicks(tables, CLICK_ROWS, numbers)
    return Training("dlrm", model, draw, loss, torch.optim.SGD(model.parameters(), lr=0.5))
