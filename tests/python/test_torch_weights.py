"""Ranks with batches of different sizes train as one process on all rows."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import poseidon.torch as poseidon
import workers
from poseidon.errors import InvalidArgument, PoseidonError
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


def refused() -> str:
    poseidon.init(timeout=10)
    model = poseidon.DistributedDataParallel(mlp())
    with pytest.raises(InvalidArgument, match="0 or more"):
        model.set_weight(-1)
    model.set_weight(0)
    with pytest.raises(InvalidArgument, match="some rank needs a row"):
        model(torch.ones(1, 48)).sum().backward()
    return "refused"


def test_weights_without_a_mean_are_refused() -> None:
    assert workers.run_fresh(2, refused) == ["refused", "refused"]


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


# Several backward passes before an exchange.


def backward(model: poseidon.DistributedDataParallel, step: int, rows: int, share: float = 1.0) -> None:
    inputs, targets = mlp_batch(step, rows)
    (share * F.mse_loss(model(inputs), targets)).backward()


def accumulate(model: poseidon.DistributedDataParallel, rows: tuple[int, int], weights: tuple[int, int]) -> None:
    """Two backward passes, one of them without exchange."""
    rank = poseidon.rank()
    model.set_weight(weights[0])
    with model.no_sync():
        backward(model, rank, rows[0], rows[0] / sum(rows))
    model.set_weight(weights[1])
    backward(model, 2 + rank, rows[1], rows[1] / sum(rows))


def accumulated(overlapped: bool, update: str | None) -> str:
    """One weight for both, which is given again before the second."""
    model, reference = poseidon.DistributedDataParallel(mlp()), mlp()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if overlapped or update == "server":
        optimizer = poseidon.DistributedOptimizer(optimizer, model, update=update)
    alone = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    rows = [(4, 1), (1, 2)]
    for step in range(3):
        optimizer.zero_grad()
        own = rows[(poseidon.rank() + step) % 2]
        accumulate(model, own, (sum(own), sum(own)))
        optimizer.step()
        alone.zero_grad()
        for rank in range(2):
            for micro, count in enumerate(rows[(rank + step) % 2]):
                inputs, targets = mlp_batch(2 * micro + rank, count)
                (F.mse_loss(reference(inputs), targets) * count / 8).backward()
        alone.step()
    with torch.no_grad():
        model(inputs)  # waits for the last step
    assert_close(model.module, reference)
    return parameters_digest(model)


@pytest.mark.parametrize(("overlapped", "update"), [(False, None), (True, "worker"), (True, "server")])
def test_one_weight_counts_for_all_backward_passes_of_a_step(overlapped: bool, update: str | None) -> None:
    assert all_equal(workers.run(2, accumulated, overlapped, update))


class Boxed:
    """An output into which torch's class does not look."""

    __slots__ = ("value",)

    def __init__(self, value: torch.Tensor) -> None:
        self.value = [value]


class Kept:
    """An output in which nobody but the program finds the tensor."""

    def __init__(self, value: torch.Tensor) -> None:
        self._get = lambda: [value]

    @property
    def value(self) -> list[torch.Tensor]:
        return self._get()


class InABox(torch.nn.Sequential):
    def __init__(self, box: Any, *parts: torch.nn.Module) -> None:
        super().__init__(*parts)
        self.box = box

    def forward(self, input: torch.Tensor) -> Any:
        output = super().forward(input)
        return self.box(output) if self.box is Kept else (output.detach() + self[0].bias, self.box(output))


def boxed(box: Any, weights: tuple[int, int], between: bool) -> None:
    """Two forward passes, with a backward pass between them or one for both."""
    model = poseidon.DistributedDataParallel(InABox(box, torch.nn.Linear(48, 4)))

    def loss(step: int) -> torch.Tensor:
        output = model(mlp_batch(step, 4)[0])
        value: torch.Tensor = (output if box is Kept else output[1]).value[0].sum()
        return value

    for step in range(2):
        model.set_weight(weights[0])
        first = loss(step)
        if between:
            first.backward()
            model.zero_grad()
        with torch.no_grad():
            loss(step)
        model.set_weight(weights[1])
        (loss(step) + (0 if between else first)).backward()
        model.zero_grad()


@pytest.mark.parametrize("box", [Boxed, Kept])
@pytest.mark.parametrize(("weights", "between"), [((4, 1), True), ((4, 4), False)])
def test_outputs_that_hide_tensors_may_be_weighted(box: Any, weights: tuple[int, int], between: bool) -> None:
    workers.run(2, boxed, box, weights, between)


def without_backward() -> None:
    """A pass that nobody needs, such as one with a bad loss."""
    model = poseidon.DistributedDataParallel(InABox(Boxed, torch.nn.Linear(48, 4)))
    for rows in (4, 2, 3):
        model.set_weight(rows)
        output = model(mlp_batch(0, rows)[0])
        if rows != 4:
            output[1].value[0].sum().backward()


def test_a_pass_without_a_backward_pass_has_no_weight() -> None:
    workers.run(2, without_backward)


def refused_on_one_rank(kind: str) -> str:
    poseidon.init(timeout=10)
    model = poseidon.DistributedDataParallel(mlp())
    other = 1 if poseidon.rank() == 1 else 4  # another weight on rank 1 alone
    try:
        if kind == "no_sync":
            accumulate(model, (4, 4), (4, other))
        elif kind == "unweighted":
            with model.no_sync():
                backward(model, 0, 4)
            model.set_weight(other)
            backward(model, 1, 4)
        elif kind == "past the wrapper":
            model.set_weight(4)
            F.mse_loss(model.module(mlp_batch(0, 4)[0]), mlp_batch(0, 4)[1]).backward()
            model.set_weight(other)
            backward(model, 1, 4)
        elif kind in ("in a box", "kept"):
            boxed(Boxed if kind == "in a box" else Kept, (4, other), between=False)
        else:
            model.set_weight(4)
            first = model(mlp_batch(0, 4)[0]).sum()
            model.set_weight(other)
            second = model(mlp_batch(1, 4)[0]).sum()
            (first + second if kind == "one backward" else first).backward()
    except PoseidonError as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


@pytest.mark.parametrize("kind", ["no_sync", "past the wrapper", "one backward", "in turn", "in a box", "kept"])
def test_two_weights_in_one_exchange_are_refused_and_no_rank_hangs(kind: str) -> None:
    first, second = workers.run_fresh(2, refused_on_one_rank, kind)
    assert second.startswith("InvalidArgument")
    assert "rows of all its backward passes" in second
    assert "rank 1 failed: InvalidArgument" in first


def test_a_weight_that_comes_after_a_backward_pass_is_refused() -> None:
    for text in workers.run_fresh(2, refused_on_one_rank, "unweighted"):
        assert "was not set" in text


def allowed() -> str:
    """What is cleared does not count, and a weight may come between forward and backward."""
    poseidon.init(timeout=10)
    model = poseidon.DistributedDataParallel(mlp())
    reference = copy.deepcopy(model.module)
    rank, rows = poseidon.rank(), (1, 3)
    for to_none in (True, False):
        accumulate(model, (2, 2), (2, 2))
        with model.no_sync():
            backward(model, 5, 2)
        model.set_weight(3)  # its forward pass has no backward
        model(mlp_batch(0, 1)[0])
        inputs, targets = mlp_batch(6, 4)
        own = slice(0, 1) if rank == 0 else slice(1, 4)
        loss = F.mse_loss(model(inputs[own]), targets[own])
        model.set_weight(rows[rank])
        for param in model.parameters():
            if to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()
        loss.backward()
        reference.zero_grad()
        F.mse_loss(reference(inputs), targets).backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
        F.mse_loss(model.module(inputs[own]), targets[own]).backward()  # such as a generator's, past the wrapper
        model.set_weight(rows[rank] + 1)
        F.mse_loss(model.module(inputs[own]), targets[own]).backward()
        model.zero_grad()
        model.set_weight(2)
    return "trained"


def test_gradients_that_are_cleared_have_no_weight() -> None:
    assert workers.run_fresh(2, allowed) == ["trained", "trained"]
