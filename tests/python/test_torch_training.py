"""Training on several workers gives what one process gets on the whole batch, on every replica the same bits."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poseidon.torch as poseidon
import workers
from torch_cases import (
    EXACT_SCHEMES,
    all_equal,
    assert_close,
    compare_gradients,
    mean_loss,
    mlp,
    mlp_batch,
    own_rows,
    parameters_digest,
    wrap,
)

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-2),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, eps=1e-2),
}


def train(scheme: str, dtype: torch.dtype, optimizer: str, accumulation: int, set_to_none: bool, rows: int) -> str:
    model, reference = wrap(mlp(dtype), scheme=scheme)
    optimizers = [OPTIMIZERS[optimizer](part.parameters()) for part in (model, reference)]
    for step in range(4):
        for one in optimizers:
            one.zero_grad(set_to_none=set_to_none)
        inputs, targets = mlp_batch(step, rows * poseidon.world_size(), dtype)
        micro = list(zip(own_rows(inputs).chunk(accumulation), own_rows(targets).chunk(accumulation), strict=True))
        for index, part in enumerate(micro):
            with contextlib.nullcontext() if index == len(micro) - 1 else model.no_sync():
                (mean_loss(model, *part) / accumulation).backward()
        mean_loss(reference, inputs, targets).backward()
        for one in optimizers:
            one.step()
    assert_close(model.module, reference)
    return parameters_digest(model)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", EXACT_SCHEMES)
def test_training_equals_one_process(scheme: str, dtype: torch.dtype, optimizer: str, accumulation: int) -> None:
    set_to_none = optimizer != "rmsprop"
    assert all_equal(workers.run(2, train, scheme, dtype, optimizer, accumulation, set_to_none, 6))


@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize("scheme", EXACT_SCHEMES)
def test_training_with_more_workers(scheme: str, world_size: int) -> None:
    assert all_equal(workers.run(world_size, train, scheme, torch.float32, "sgd", 2, True, 4))


@pytest.mark.parametrize("scheme", EXACT_SCHEMES)
@pytest.mark.parametrize("option", [{"schedule": "sequential"}, {"partition": "coarse"}, {"partition": "central"}])
def test_training_with_baselines(scheme: str, option: dict[str, str]) -> None:
    assert all_equal(workers.run(2, train, scheme, torch.float32, "sgd", 2, True, 4, **option))


def test_training_with_small_chunks_and_groups() -> None:
    options = {"chunk_bytes": 1000, "small_bytes": 200, "group_bytes": 400}
    assert all_equal(workers.run(3, train, "auto", torch.float32, "sgd", 1, True, 4, **options))


def schemes_by_batch() -> list[list[str]]:
    model, _ = wrap(mlp())
    taken = []
    for step, rows in enumerate([4, 4, 200, 200, 4, 4]):
        model.zero_grad()
        mean_loss(model, *mlp_batch(step, rows)).backward()
        taken.append(next(row.scheme for row in model.synchronization_stats() if row.name == "0.weight"))
    return taken


def test_the_scheme_follows_the_factor_count_one_step_later() -> None:
    answers = workers.run(2, schemes_by_batch)
    assert answers[0] == ["sfb", "sfb", "sfb", "ps", "ps", "sfb"]
    assert all_equal(answers)


def uneven_rows(rows_by_step: list[list[int]], scheme: str) -> str:
    """Each rank has its own number of rows, perhaps none; the loss is a sum, the gradient a mean over ranks."""
    model, reference = wrap(mlp(), scheme=scheme)
    digests = []
    for step, rows in enumerate(rows_by_step):
        inputs, targets = mlp_batch(step, sum(rows))
        model.zero_grad()
        reference.zero_grad()
        begin = sum(rows[: poseidon.rank()])
        end = begin + rows[poseidon.rank()]
        F.mse_loss(model(inputs[begin:end]), targets[begin:end], reduction="sum").backward()
        (F.mse_loss(reference(inputs), targets, reduction="sum") / poseidon.world_size()).backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
        digests.append(parameters_digest(nn.ParameterList([p.grad for p in model.parameters()])))
    return " ".join(digests)


@pytest.mark.parametrize("scheme", EXACT_SCHEMES)
def test_ranks_with_different_batches(scheme: str) -> None:
    rows = [[3, 1, 5], [0, 4, 2], [0, 0, 3], [0, 0, 0], [60, 1, 0], [2, 2, 90], [1, 1, 1]]
    assert all_equal(workers.run(3, uneven_rows, rows, scheme))


class Transformer(nn.Module):
    """Tied embeddings, attention, norms, 3-D Linear input."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.feed = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.head(x + self.feed(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(10, 12, num_layers=2, batch_first=True)
        self.out = nn.Linear(12, 30)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x)[0][:, -1])


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(4))
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 30))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x))


def _inputs(kind: str, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(0, 30, (4,), generator=generator)
    if kind == "transformer":
        return torch.randint(0, 30, (4, 5), generator=generator), torch.randint(0, 30, (4, 5), generator=generator)
    if kind == "recurrent":
        return torch.randn(4, 6, 10, generator=generator), labels
    images = torch.randn(4, 3, 8, 8, generator=generator)
    return (images.to(memory_format=torch.channels_last) if kind == "channels_last" else images), labels


def architecture(kind: str, scheme: str) -> str:
    torch.manual_seed(3)
    module: nn.Module
    if kind == "transformer":
        module = Transformer()
    elif kind == "recurrent":
        module = Recurrent()
    else:
        module = Convolutional()
        if kind == "channels_last":
            module = module.to(memory_format=torch.channels_last)

    def loss(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(inputs).reshape(-1, 30), labels.reshape(-1))

    return compare_gradients(module, lambda step: _inputs(kind, step), loss, scheme=scheme)[0]


@pytest.mark.parametrize("kind", ["transformer", "recurrent", "convolutional", "channels_last"])
@pytest.mark.parametrize("scheme", ["auto", "ps", "sfb"])
def test_architectures(kind: str, scheme: str) -> None:
    assert all_equal(workers.run(2, architecture, kind, scheme))
