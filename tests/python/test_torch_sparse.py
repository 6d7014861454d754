"""Sparse gradients of embeddings: what torch's DDP gives, with the rows that some rank has, for any optimizer."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

import poseidon.torch as poseidon
import workers
from poseidon.torch.model.gradient_form import form_of
from poseidon.torch.process.context import context
from test_torch_staged import staged
from torch_cases import all_equal, assert_close, digest, parameters_digest, run_beside_torch
from waiting import compute_for

ROWS, COLS, STEPS = 20, 6, 4


class Words(nn.Module):
    """Two sparse tables, one of which has rows that are never trained, and a dense layer."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(ROWS, COLS, sparse=True, padding_idx=0)
        self.bag = nn.EmbeddingBag(ROWS - 5, COLS, sparse=True, mode="sum")
        self.out = nn.Linear(COLS, 3)
        self.to(dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        words = self.words(tokens)
        # The last word is there, with a gradient of zeros.
        words = torch.cat([words[:, :-1], 0 * words[:, -1:]], 1)
        return self.out(torch.tanh(words.sum(1) + self.bag(tokens % (ROWS - 5))))


def tokens_of(rank: int, step: int) -> torch.Tensor:
    """Most rows are some ranks' only, and some nobody's."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, ROWS, (2, 3), generator=generator)


def tiny_beside_counts() -> list[bool]:
    """The last values of a table are small, and lie beside the counts of its rows in what is exchanged."""
    torch.manual_seed(0)
    table = nn.Embedding(33, 7, sparse=True)
    model = poseidon.DistributedDataParallel(nn.Sequential(table), scheme="ps", wire="int8")
    answers = []
    for factor in (1e-4, 1e4):
        model.zero_grad()
        (factor * model(torch.tensor([1, 31, 32]))).sum().backward()
        grad = table.weight.grad
        assert grad is not None
        grad = grad.coalesce()
        answers.append(grad.indices().tolist() == [[1, 31, 32]])
        answers.append(bool(((grad.values() - factor).abs() <= factor / 100).all()))
    return answers


def test_int8_spares_the_counts_of_rows() -> None:
    assert workers.run(2, tiny_beside_counts, small_bytes=0) == [[True] * 4] * 2


def assert_same_gradients(ours: nn.Module, theirs: nn.Module, tolerance: float = 1e-5) -> None:
    wanted = dict(theirs.named_parameters())
    for name, param in ours.named_parameters():
        assert_same(name, param.grad, wanted[name].grad, tolerance)


def assert_same(name: str, grad: torch.Tensor | None, wanted: torch.Tensor | None, tolerance: float) -> None:
    assert (grad is None) == (wanted is None), name
    if grad is None or wanted is None:
        return
    assert grad.layout == wanted.layout, f"{name}: {grad.layout}, wanted {wanted.layout}"
    if grad.is_sparse:
        assert grad.is_coalesced()
        wanted = wanted.coalesce()
        assert torch.equal(grad.indices(), wanted.indices()), f"{name}: {grad.indices()}, wanted {wanted.indices()}"
        grad, wanted = grad.values(), wanted.values()
    torch.testing.assert_close(grad, wanted, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}")


def gradients_digest(module: nn.Module) -> str:
    grads = [param.grad for param in module.parameters() if param.grad is not None]
    return digest(part for grad in grads for part in ([grad.indices(), grad.values()] if grad.is_sparse else [grad]))


def backward(model: Any, step: int, parts: int) -> None:
    """Accumulates `parts` backward passes, of which the last is synchronized."""
    for part in range(parts):
        with contextlib.nullcontext() if part == parts - 1 else model.no_sync():
            model(tokens_of(poseidon.rank(), 100 * part + step)).square().mean().backward()


OPTIMIZERS: dict[str, Callable[[Words], list[Optimizer]]] = {
    "sgd": lambda model: [SGD(model.parameters(), lr=0.1)],
    "momentum": lambda model: [SGD(model.parameters(), lr=0.1, momentum=0.9)],
    "adagrad": lambda model: [Adagrad(model.parameters(), lr=0.1)],
    "sparse_adam": lambda model: [
        SparseAdam([model.words.weight, model.bag.weight], lr=0.01),
        SGD(model.out.parameters(), lr=0.1),
    ],
}


def train_beside_torch(optimizer: str, parts: int, set_to_none: bool) -> str:
    ours, theirs = Words(), Words()
    model, reference = poseidon.DistributedDataParallel(ours), TorchDistributedDataParallel(theirs)
    optimizers = [*OPTIMIZERS[optimizer](ours), *OPTIMIZERS[optimizer](theirs)]
    for step in range(STEPS):
        for one in optimizers:
            one.zero_grad(set_to_none)
        for part in (model, reference):
            backward(part, step, parts)
        assert_same_gradients(ours, theirs)
        assert ours.words.weight.grad is not None
        assert ours.words.weight.grad.is_sparse
        for one in optimizers:
            one.step()
    assert_close(ours, theirs, 1e-5)
    return parameters_digest(ours)


def train_all_beside_torch() -> list[str]:
    return [train_beside_torch(name, parts, name != "adagrad") for name in OPTIMIZERS for parts in (1, 3)]


def test_training_equals_torchs(tmp_path: Path) -> None:
    assert all_equal(run_beside_torch(2, tmp_path / "store", train_all_beside_torch))


def mean_of_ranks(module: Words, step: int) -> Words:
    """A copy of the module with the mean gradient, computed here alone."""
    copies = [copy.deepcopy(module) for _ in range(poseidon.world_size())]
    for rank, one in enumerate(copies):
        one.zero_grad()
        one(tokens_of(rank, step)).square().mean().backward()
    for params in zip(*(one.parameters() for one in copies), strict=True):
        grads = [param.grad for param in params if param.grad is not None]
        total = sum((grad.float() for grad in grads[1:]), grads[0].float()) / len(
            copies
        )  # torch cannot add sparse halves
        params[0].grad = total.to(params[0].dtype)
    return copies[0]


def gradients(dtype: torch.dtype, scheme: Any) -> str:
    module = Words(dtype)
    model = poseidon.DistributedDataParallel(module, scheme=scheme)
    digests = []
    for step in range(3):
        expected = mean_of_ranks(module, step)
        model.zero_grad()
        model(tokens_of(poseidon.rank(), step)).square().mean().backward()
        assert_same_gradients(module, expected, 1e-5 if dtype.itemsize > 2 else 2e-2)
        digests.append(gradients_digest(module))
    return " ".join(digests)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"small_bytes": 1 << 20}, {"small_bytes": 0, "chunk_bytes": 4096}])
def test_gradients_of_every_dtype(dtype: torch.dtype, options: dict[str, int]) -> None:
    assert all_equal(workers.run(3, gradients, dtype, "auto", **options))


@pytest.mark.parametrize("scheme", ["sfb", "rows", {"words": "ps", "*": "auto"}])
def test_schemes(scheme: Any) -> None:
    assert all_equal(workers.run(2, gradients, torch.float32, scheme))


def test_through_host_memory() -> None:
    assert all_equal(workers.run(2, staged, gradients, torch.float32, "auto"))


class Sometimes(nn.Module):
    """Uses its table on rank 1 alone, or on none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(ROWS, COLS, sparse=True)
        self.other = nn.Linear(COLS, COLS)

    def forward(self, tokens: torch.Tensor, uses: Iterable[int]) -> torch.Tensor:
        hidden = self.other(torch.ones(2, COLS))
        return hidden + self.table(tokens).sum(1) if poseidon.rank() in uses else hidden


def unused() -> str:
    model = poseidon.DistributedDataParallel(Sometimes())
    table = model.module.table.weight
    model(tokens_of(1, 0), ()).sum().backward()
    assert table.grad is None
    model.zero_grad()
    model(tokens_of(1, 0), (1,)).sum().backward()
    grad = table.grad
    assert grad is not None
    rows, counts = tokens_of(1, 0).unique(return_counts=True)
    expected = (counts / poseidon.world_size()).unsqueeze(1).expand(-1, COLS)
    assert_same("table", grad, torch.sparse_coo_tensor(rows.unsqueeze(0), expected, table.shape), 1e-6)
    model.zero_grad(set_to_none=False)  # rows that are not there, where None is no gradient
    assert table.grad is not None
    model(tokens_of(1, 0), ()).sum().backward()
    assert table.grad is not None
    assert table.grad.is_sparse
    assert table.grad._nnz() == 0
    return digest([grad.indices(), grad.values()])


def test_a_table_that_some_or_all_ranks_do_not_use() -> None:
    assert all_equal(workers.run(3, unused))


class Tied(nn.Module):
    """The table is also the weight of a layer with dense gradients, on rank 1 in every other step alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(ROWS, COLS, sparse=True)
        self.out = nn.Linear(COLS, ROWS, bias=False)
        self.out.weight = self.table.weight

    def forward(self, tokens: torch.Tensor, dense: bool) -> torch.Tensor:
        words = self.table(tokens)
        return (self.out(words) if dense else words).square().sum()


def tied() -> str:
    module = Tied()
    model = poseidon.DistributedDataParallel(module)
    digests = []
    for step in range(4):
        copies = [copy.deepcopy(module) for _ in range(poseidon.world_size())]
        for rank, one in enumerate(copies):
            one.zero_grad()
            one(tokens_of(rank, step), rank == 1 and step % 2 == 0).backward()
        model.zero_grad()
        model(tokens_of(poseidon.rank(), step), poseidon.rank() == 1 and step % 2 == 0).backward()
        grad = module.table.weight.grad
        assert grad is not None
        assert grad.is_sparse == (step % 2 == 1)
        dense = sum(one.table.weight.grad.to_dense() for one in copies) / len(copies)
        torch.testing.assert_close(grad.to_dense(), dense)
        digests.append(digest([grad.to_dense()]))
    return " ".join(digests)


def test_a_table_with_dense_gradients_on_some_rank() -> None:
    assert all_equal(workers.run(2, tied))


def train_with(overlapped: bool, name: str, zero_in_place: bool) -> list[str]:
    module = Words()
    model = poseidon.DistributedDataParallel(module)
    optimizers = OPTIMIZERS[name](module)
    if overlapped:
        optimizers = [poseidon.DistributedOptimizer(one, model) for one in optimizers]
    seen = []
    for step in range(STEPS):
        for one in optimizers:
            one.zero_grad(not zero_in_place)
        model(tokens_of(poseidon.rank(), step)).square().mean().backward()
        if step % 2:
            grad = module.words.weight.grad
            assert grad is not None
            assert grad.is_sparse
            seen.append(digest([grad.coalesce().values()]))
        for one in optimizers:
            one.step()
    if overlapped:
        assert isinstance(optimizers[0], poseidon.DistributedOptimizer)
        assert (optimizers[0].memory().worker_side > 0) == (name != "sgd")
    seen.append(parameters_digest(module))
    return seen


def compare_optimizers(name: str, zero_in_place: bool) -> list[str]:
    plain = train_with(False, name, zero_in_place)
    assert train_with(True, name, zero_in_place) == plain
    return plain


@pytest.mark.parametrize("zero_in_place", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_overlapped_updates_have_the_same_bits(name: str, zero_in_place: bool) -> None:
    assert all_equal(workers.run(2, compare_optimizers, name, zero_in_place))


def with_a_late_rank(overlapped: bool) -> tuple[str, int]:
    """Rank 2 alone uses the table, and its last steps come too late to be in."""
    model = poseidon.DistributedDataParallel(Sometimes())
    optimizer: Optimizer = SGD(model.parameters(), lr=0.1)
    if overlapped:
        optimizer = poseidon.DistributedOptimizer(optimizer, model)
    client, late_steps = context().client, 0
    assert client is not None
    layer = next(entry.layer for entry in model.synced_parameters if entry.name == "table.weight")
    for step in range(15):
        optimizer.zero_grad()
        loss = model(tokens_of(2, step), (2,)).square().sum()
        compute_for(0.06 if poseidon.rank() == 2 and step > 10 else 0.002)
        loss.backward()
        grad = model.module.table.weight.grad
        assert grad is None or grad.is_sparse
        optimizer.step()
        late_steps += client.layer_stats(layer).late
    poseidon.barrier()
    return parameters_digest(model.module), late_steps


@pytest.mark.parametrize("overlapped", [False, True])
def test_rows_that_came_too_late_are_used_by_nobody(overlapped: bool) -> None:
    answers = workers.run(3, with_a_late_rank, overlapped, stragglers="drop", small_bytes=0)
    assert all_equal([same for same, _ in answers])
    assert answers[2][1] > 0


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(ROWS, COLS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.table, sparse=True)


def refused() -> None:
    model = poseidon.DistributedDataParallel(Words())
    with pytest.raises(poseidon.PoseidonError, match=r"parameter words\.weight with sparse gradients.*update='worker'"):
        poseidon.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model, update="server")
    with pytest.raises(
        poseidon.PoseidonError, match=r"max_norm and parameter words\.weight with sparse gradients exclude"
    ):
        poseidon.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model, max_norm=1.0)
    poseidon.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model)  # what was refused has left nothing behind


@pytest.mark.parametrize("world_size", [1, 2])
def test_optimizers_that_cannot(world_size: int) -> None:
    workers.run(world_size, refused)


def unannounced() -> str:
    poseidon.init()
    model = poseidon.DistributedDataParallel(Functional())
    try:
        model(tokens_of(0, 0)).sum().backward()
    except poseidon.PoseidonError as error:
        return str(error)
    return "nothing was raised"


def test_a_sparse_gradient_that_no_module_announces_is_named() -> None:
    answers = workers.run_fresh(2, unannounced)
    assert any("the gradient of parameter table has layout torch.sparse_coo" in str(answer) for answer in answers)
    assert all("nothing" not in str(answer) for answer in answers)


def test_a_gradient_of_zeros_has_no_rows() -> None:
    table = nn.Parameter(torch.ones(ROWS, COLS))
    table.grad = form_of(table, sparse=True, by_rows=True).zeros(table)
    assert table.grad.is_sparse
    SparseAdam([table], lr=0.1).step()
    assert bool((table == 1).all())


def sparse_on_one_rank_only() -> str:
    module = Words()
    module.words.sparse = poseidon.rank() == 0
    try:
        poseidon.DistributedDataParallel(module)
    except poseidon.PoseidonError as error:
        return f"{error.code}: {error}"
    return "nothing was raised"


def test_ranks_that_differ_in_what_is_sparse_are_told() -> None:
    for answer in workers.run(2, sparse_on_one_rank_only):
        assert answer.startswith("mismatch")
        assert "words.weight" in answer
        assert "sparse gradients" in answer
