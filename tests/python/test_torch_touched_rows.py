"""Dense gradients of embeddings: only the rows that are not zeros travel, with the result of the dense exchange."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.utils.checkpoint import checkpoint

import poseidon.torch as poseidon
import workers
from poseidon.torch.model.gradient_form import TouchedRowsForm, form_of
from poseidon.torch.process.context import context
from test_torch_staged import staged
from torch_cases import all_equal, digest, parameters_digest

ROWS, STEPS = 3000, 4

Forward = Callable[[nn.Module, torch.Tensor, int], torch.Tensor]


class Words(nn.Module):
    """Two tables and a dense layer."""

    def __init__(self, dtype: torch.dtype = torch.float32, cols: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(ROWS, cols, padding_idx=0)
        self.bag = nn.EmbeddingBag(ROWS - 5, cols, mode="sum")
        self.out = nn.Linear(cols, 3)
        self.to(dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.words(tokens).sum(1) + self.bag(tokens % (ROWS - 5))))


def tokens_of(rank: int, step: int, count: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, ROWS // 10, (count, 3), generator=generator) ** 2 % ROWS  # ranks share some rows


def plainly(model: nn.Module, tokens: torch.Tensor, step: int) -> torch.Tensor:
    return model(tokens)


def exchanged_by(model: Any, name: str) -> str:
    """The scheme of the parameter's next exchange."""
    client = context().client
    assert client is not None
    return client.next_scheme(next(entry.layer for entry in model.synced_parameters if entry.name == name))


def assert_same_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    wanted = dict(theirs.named_parameters())
    for name, param in ours.named_parameters():
        grad, other = param.grad, wanted[name].grad
        assert (grad is None) == (other is None), name
        if grad is not None and other is not None:
            assert grad.layout == torch.strided
            assert torch.equal(grad, other), name  # all bits, but for the sign of zeros


def train_beside_ps(make: Callable[[], nn.Module], forward: Forward = plainly, parts: int = 1) -> list[str]:
    """Each step by rows, if it may, and by ps. Returns the schemes, and a digest of the gradients, of each step."""
    ours, theirs = make(), make()
    model = poseidon.DistributedDataParallel(ours)
    reference = poseidon.DistributedDataParallel(theirs, scheme="ps")
    seen = []
    for step in range(STEPS):
        for wrapped in (model, reference):
            wrapped.zero_grad(set_to_none=step % 2 == 0)
            for part in range(parts):
                with contextlib.nullcontext() if part == parts - 1 else wrapped.no_sync():
                    tokens = tokens_of(poseidon.rank(), 100 * part + step)
                    forward(wrapped, tokens, step).square().mean().backward()
        assert_same_gradients(ours, theirs)
        seen += [exchanged_by(model, "words.weight"), digest(p.grad for p in ours.parameters() if p.grad is not None)]
    return seen


def schemes_of(answers: list[list[str]]) -> list[str]:
    assert all_equal(answers)
    return answers[0][::2]


@pytest.mark.parametrize("parts", [1, 3])
def test_touched_rows_give_what_a_dense_exchange_gives(parts: int) -> None:
    assert schemes_of(workers.run(3, train_beside_ps, Words, plainly, parts)) == ["rows"] * STEPS


def of_dtype(dtype: torch.dtype, cols: int) -> list[str]:
    return train_beside_ps(lambda: Words(dtype, cols))


@pytest.mark.parametrize(
    ("dtype", "cols"), [(torch.float64, 5), (torch.bfloat16, 13), (torch.float16, 6), (torch.float32, 5)]
)
def test_every_dtype_and_width(dtype: torch.dtype, cols: int) -> None:
    assert schemes_of(workers.run(2, of_dtype, dtype, cols)) == ["rows"] * STEPS


def test_through_host_memory() -> None:
    assert schemes_of(workers.run(2, staged, train_beside_ps, Words)) == ["rows"] * STEPS


def tied_by_function(model: Any, tokens: torch.Tensor, step: int) -> torch.Tensor:
    """Uses the whole table past its module: rank 1 in step 0, all ranks in step 1."""
    out = model(tokens)
    if step == 1 or (step == 0 and poseidon.rank() == 1):
        return out.sum() + F.linear(torch.ones(2, 8), model.module.words.weight).sum()
    return out


def recomputed(model: Any, tokens: torch.Tensor, step: int) -> torch.Tensor:
    module = model.module
    if not hasattr(module, "_plain_forward"):
        object.__setattr__(module, "_plain_forward", module.forward)
        module.forward = lambda tokens: checkpoint(module._plain_forward, tokens, use_reentrant=False)
    return model(tokens)


def twice(model: Any, tokens: torch.Tensor, step: int) -> torch.Tensor:
    return model(tokens) * model(tokens.flip(0) + 1)


def hooked(model: Any, tokens: torch.Tensor, step: int) -> torch.Tensor:
    """A hook puts a row into the gradient that forward has not touched."""
    if step == 0:
        model.module.words.weight.register_hook(lambda grad: grad.index_fill(0, torch.tensor([ROWS - 1]), 3.0))
    return model(tokens)


def compiled(model: Any, tokens: torch.Tensor, step: int) -> torch.Tensor:
    if not hasattr(model.module, "_compiled"):
        object.__setattr__(model.module, "_compiled", True)
        model.module.compile(backend="eager")
    return model(tokens)


@pytest.mark.parametrize("forward", [recomputed, twice, hooked, compiled])
def test_rows_that_forward_does_not_tell_are_not_lost(forward: Forward) -> None:
    assert schemes_of(workers.run(2, train_beside_ps, Words, forward)) == ["rows"] * STEPS


def test_a_weight_that_is_used_elsewhere_too_goes_back_to_ps() -> None:
    schemes = schemes_of(workers.run(2, train_beside_ps, Words, tied_by_function))
    assert schemes == ["rows", "ps", "rows", "rows"]


class Clipped(Words):
    def __init__(self) -> None:
        super().__init__()
        self.words.max_norm = 1.0


def test_max_norm() -> None:
    assert schemes_of(workers.run(2, train_beside_ps, Clipped)) == ["rows"] * STEPS


class Tied(Words):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, ROWS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(tokens).sum(1)).sum() + super().forward(tokens).sum()


def test_a_table_that_is_a_head_too_is_dense() -> None:
    assert schemes_of(workers.run(2, train_beside_ps, Tied)) == ["ps"] * STEPS


def many_rows(model: Any, tokens: torch.Tensor, step: int) -> torch.Tensor:
    return model(torch.arange(ROWS).reshape(-1, 3) if step % 2 == 0 else tokens)


def test_ps_where_rows_would_be_more_bytes() -> None:
    schemes = schemes_of(workers.run(4, train_beside_ps, Words, many_rows))
    assert schemes == ["ps", "rows", "ps", "rows"]


def test_small_tables_travel_with_others() -> None:
    assert schemes_of(workers.run(2, train_beside_ps, Words, small_bytes=1 << 20)) == ["ps"] * STEPS


class Sometimes(Words):
    """Uses its tables or not."""

    def forward(self, tokens: torch.Tensor, uses: bool = True) -> torch.Tensor:
        return super().forward(tokens) if uses else self.out(torch.ones(2, 8))


def used_by_some(model: Any, tokens: torch.Tensor, step: int) -> torch.Tensor:
    return model(tokens, step < 2 and poseidon.rank() == 1)


def test_a_table_that_some_or_no_ranks_use() -> None:
    schemes = schemes_of(workers.run(3, train_beside_ps, Sometimes, used_by_some))
    assert schemes[:2] == ["rows", "rows"]


def train_with(make: Callable[[Any], list[Optimizer]], wrap: str, scheme: str) -> str:
    module = Words()
    model = poseidon.DistributedDataParallel(module, scheme=scheme)
    optimizers = make(module)
    if wrap:
        optimizers = [poseidon.DistributedOptimizer(one, model, update=wrap) for one in optimizers]
    for step in range(STEPS):
        for one in optimizers:
            one.zero_grad()
        model(tokens_of(poseidon.rank(), step)).square().mean().backward()
        for one in optimizers:
            one.step()
    return parameters_digest(module)


def optimizers_agree() -> list[str]:
    results = []
    makes: list[Callable[[Any], list[Optimizer]]] = [
        lambda module: [SGD(module.parameters(), lr=0.1, momentum=0.9)],
        lambda module: [Adam(module.parameters(), lr=0.01)],
    ]
    for make in makes:
        plain = train_with(make, "", "ps")
        assert train_with(make, "", "auto") == plain
        assert train_with(make, "worker", "auto") == plain
        assert train_with(make, "server", "auto") == train_with(make, "server", "ps")
        results.append(plain)
    return results


def test_optimizers() -> None:
    assert all_equal(workers.run(2, optimizers_agree))


def bytes_of_a_step(scheme: str) -> int:
    model = poseidon.DistributedDataParallel(nn.Embedding(100_000, 16), scheme=scheme)
    client = context().client
    assert client is not None
    entry = model.synced_parameters[0]
    for step in range(2):
        model.zero_grad()
        model(tokens_of(poseidon.rank(), step)).sum().backward()
    stats = client.layer_stats(entry.layer)
    return int(stats.bytes_sent + stats.bytes_received)


def test_bytes_are_those_of_the_rows() -> None:
    for rows, dense in zip(workers.run(2, bytes_of_a_step, "auto"), workers.run(2, bytes_of_a_step, "ps"), strict=True):
        assert 0 < rows < 0.01 * dense


@pytest.mark.parametrize("cols", [1, 2, 3, 8])
def test_rows_are_zeros_only_if_all_their_bits_are(cols: int) -> None:
    table = torch.zeros(40, cols, dtype=torch.float16)
    form = form_of(table, sparse=False, by_rows=True)
    assert isinstance(form, TouchedRowsForm)
    grad = torch.zeros_like(table)
    grad[3, -1], grad[7, 0], grad[11, -1] = float("nan"), -0.0, 6e-8
    found = form.rows_of(grad)
    assert found is not None
    assert found[0].tolist() == [3, 7, 11]
    assert torch.equal(form.from_rows(*found), grad) or bool(grad.isnan().any())
    assert form.rows_of(torch.ones_like(table)) is None
