"""Ranks with batches of different sizes train as one process on all rows."""

from __future__ import annotations

import copy
import time

import pytest
import torch
import torch.nn.functional as F

import poseidon.torch as poseidon
import workers
from poseidon.errors import InvalidArgument
from poseidon.torch.process.collectives import balanced_rows
from torch_cases import EXACT_SCHEMES, all_equal, assert_close, mlp, mlp_batch, parameters_digest
from waiting import compute_for

SIZES = ([3, 1], [1, 3], [5, 0])


def own_part(tensor: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    return tensor.split(sizes)[poseidon.rank()]


def train(scheme: str, overlapped: bool, update: str | None, in_turn: bool) -> str:
    module = mlp()
    reference = copy.deepcopy(module)
    model = poseidon.DistributedDataParallel(module, scheme=scheme)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if overlapped or update == "server":
        optimizer = poseidon.DistributedOptimizer(optimizer, model, update=update)
    alone = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        sizes = SIZES[step % 2] if in_turn else SIZES[0]
        inputs, targets = mlp_batch(step, sum(sizes))
        if in_turn or step == 0:
            model.set_weight(sizes[poseidon.rank()])
        optimizer.zero_grad()
        F.mse_loss(model(own_part(inputs, sizes)), own_part(targets, sizes)).backward()
        optimizer.step()
        alone.zero_grad()
        F.mse_loss(reference(inputs), targets).backward()
        alone.step()
    with torch.no_grad():
        model(inputs)  # waits for the last step
    assert_close(model.module, reference)
    return parameters_digest(model)


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize(("overlapped", "update"), [(False, None), (True, "worker"), (True, "server")])
@pytest.mark.parametrize("scheme", EXACT_SCHEMES)
def test_the_mean_is_over_all_rows(scheme: str, overlapped: bool, update: str | None, in_turn: bool) -> None:
    if update == "server" and scheme not in ("auto", "ps"):
        pytest.skip("what servers update goes by ps")
    assert all_equal(workers.run(2, train, scheme, overlapped, update, in_turn))


def one_without_rows() -> str:
    model = poseidon.DistributedDataParallel(mlp())
    reference = copy.deepcopy(model.module)
    inputs, targets = mlp_batch(0, 5)
    sizes = SIZES[2]
    model.set_weight(sizes[poseidon.rank()])
    own = own_part(inputs, sizes)
    loss = F.mse_loss(model(own), own_part(targets, sizes)) if len(own) else model(inputs[:1]).sum()
    loss.backward()
    F.mse_loss(reference(inputs), targets).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    return parameters_digest(model)


def test_a_rank_without_rows_does_not_count() -> None:
    assert all_equal(workers.run(2, one_without_rows))


def sparse() -> None:
    table = torch.nn.Embedding(50, 3, sparse=True)
    torch.nn.init.constant_(table.weight, 1.0)
    model = poseidon.DistributedDataParallel(table)
    rank = poseidon.rank()
    model.set_weight(1 + 2 * rank)
    model(torch.tensor([7])).sum().backward()
    gradient = table.weight.grad.to_dense()
    torch.testing.assert_close(gradient[7], torch.ones(3))  # (1·1 + 3·1) / 4, not (1 + 3) / 2
    model.zero_grad()
    model(torch.tensor([rank])).sum().backward()
    gradient = table.weight.grad.to_dense()
    torch.testing.assert_close(gradient[:2, 0], torch.tensor([0.25, 0.75]))


def test_rows_of_embeddings_are_weighted() -> None:
    workers.run(2, sparse)


def refused() -> None:
    model = poseidon.DistributedDataParallel(mlp())
    with pytest.raises(InvalidArgument, match="0 or more"):
        model.set_weight(-1)
    model.set_weight(0)
    with pytest.raises(InvalidArgument, match="some rank needs a row"):
        model(torch.ones(1, 48)).sum().backward()


def test_weights_without_a_mean_are_refused() -> None:
    workers.run_fresh(2, refused)


def with_hook() -> None:
    model = poseidon.DistributedDataParallel(mlp())
    model.set_weight(2)

    def hook(state: object, bucket: object) -> None:
        raise AssertionError

    with pytest.raises(InvalidArgument, match="knows no weights"):
        model.register_comm_hook(None, hook)


def with_median() -> None:
    model = poseidon.DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    poseidon.DistributedOptimizer(optimizer, model, update="server", aggregator="median")
    with pytest.raises(InvalidArgument, match="median' knows no weights"):
        model.set_weight(2)


def test_an_aggregator_and_weights_exclude_each_other() -> None:
    workers.run(2, with_median)


def test_a_communication_hook_and_weights_exclude_each_other() -> None:
    workers.run(2, with_hook)


@pytest.mark.parametrize(
    ("rows", "seconds", "balanced"),
    [
        ([8, 8], [3.0, 1.0], [4, 12]),
        ([4, 12], [1.0, 1.0], [4, 12]),
        ([1, 1, 1], [1.0, 1.0, 1.0], [1, 1, 1]),
        ([10, 10], [1.0, 2.0], [13, 7]),
        ([2, 2], [1.0, 1000.0], [3, 1]),
    ],
)
def test_rows_are_shared_out_by_speed(rows: list[int], seconds: list[float], balanced: list[int]) -> None:
    assert balanced_rows(rows, seconds) == balanced
    assert sum(balanced) == sum(rows)


def test_an_unknown_speed_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="rank 1"):
        balanced_rows([1, 0], [1.0, 1.0])


def steps_with_balance() -> tuple[int, float, float]:
    """A rank that is three times as slow: the time of a step before and after, and the rows that it took."""
    model = poseidon.DistributedDataParallel(mlp())
    seconds_per_row = 0.02 * (3 if poseidon.rank() == 0 else 1)
    rows, times = 8, []
    for _ in range(3):
        begin = time.monotonic()
        model.set_weight(rows)
        loss = model(torch.ones(rows, 48)).mean()
        compute_for(seconds_per_row * rows)
        computed = time.monotonic() - begin
        loss.backward()
        times.append(time.monotonic() - begin)
        rows = poseidon.balance_rows(rows, computed)
    return rows, times[0], times[-1]


def test_balanced_batches_of_unequal_workers_are_faster() -> None:
    answers = workers.run(2, steps_with_balance)
    assert [rows for rows, _, _ in answers] == [4, 12]
    assert all(before / after > 1.8 for _, before, after in answers), answers
