"""What is exchanged first: the order of the forward pass, the same on all ranks, and the threshold."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

import poseidon.torch as poseidon
import workers
from overlap_cases import Branches, Model, own_batch, plain_loop, train_step, wrapped
from poseidon.adapter import threshold_search
from torch_cases import all_equal, mean_loss, parameters_digest


def momentum(params: Any) -> Optimizer:
    return SGD(params, lr=0.02, momentum=0.9)


def by_urgency(model: Model) -> list[str]:
    rows = [row for row in model.plan() if row.urgency is not None]
    return [row.layer for row in sorted(rows, key=lambda row: -row.urgency)]  # type: ignore[operator]


def order_of_branches() -> list[str]:
    model, optimizer = wrapped(True, momentum, Branches())
    assert by_urgency(model) == []
    with torch.no_grad():
        model.module.out(torch.ones(1, 40))  # outside of a training pass
    train_step(model, optimizer, 0)
    first = by_urgency(model)
    plain_loop(model, optimizer, 3)
    assert by_urgency(model) == first
    return first


def test_urgency_follows_the_forward_pass() -> None:
    """`tied.weight` is used first, by `first`; `borrowed` by another module; `never` is last."""
    answers = workers.run(2, order_of_branches)
    assert all_equal(answers)
    assert answers[0] == [
        *("tied.weight", "first.bias", "tied.bias", "norm.weight", "norm.bias", "twice.weight", "twice.bias"),
        *("borrowed.weight", "borrowed.bias", "sometimes.weight", "sometimes.bias", "out.weight", "out.bias"),
        *("turned", "gappy", "never.weight", "never.bias"),
    ]


class ByRank(nn.Module):
    """Another order on every rank but rank 0's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(48, 48) for _ in range(3)])
        self.last = nn.Linear(48, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(3):
            x = torch.tanh(self.layers[(index + 1 + poseidon.rank()) % 3](x))
        return self.last(x)


def ranks_differ() -> tuple[list[str], str]:
    model, optimizer = wrapped(True, momentum, ByRank())
    plain_loop(model, optimizer, 3)
    return by_urgency(model), parameters_digest(model)


def test_the_order_of_rank_0_counts() -> None:
    answers = workers.run(3, ranks_differ)
    assert all_equal(answers)
    assert [name[:8] for name in answers[0][0]][::2] == ["layers.1", "layers.2", "layers.0", "last.wei"]


def baseline_order() -> list[Any]:
    model, optimizer = wrapped(True, momentum)
    train_step(model, optimizer, 0)
    rows = list(model.plan())
    return [[row.urgency for row in rows], [row.priority_class for row in rows], parameters_digest(model)]


def test_orders_of_the_baselines() -> None:
    sixths = [1 - index / 6 for index in range(6)]
    results = {}
    for order in ("urgency", "reverse", "random", "fifo"):
        answers = workers.run(2, baseline_order, priority_order=order, priority_threshold="0.5")
        assert all_equal(answers)
        results[order] = answers[0]
    assert results["urgency"][:2] == [sixths, [0, 0, 0, 1, 1, 1]]
    assert results["reverse"][:2] == [sixths[::-1], [1, 1, 1, 0, 0, 0]]
    assert sorted(results["random"][0], reverse=True) == sixths
    assert results["random"][0] not in (sixths, sixths[::-1])
    assert results["fifo"][1] == [1] * 6
    assert len({digest for _, _, digest in results.values()}) == 1


def calls_of() -> list[Any]:
    """What the client is told."""
    model, optimizer = wrapped(True, momentum, Convolutions())
    told: list[Any] = []
    client = model.synchronizer._client

    class Telling:
        def __getattr__(self, name: str) -> Any:
            return getattr(client, name)

        def set_priorities(self, first: int, urgencies: Any, classes: Any, threshold: float) -> None:
            told.append((len(urgencies), classes, threshold))
            client.set_priorities(first, urgencies, classes, threshold)

    model.synchronizer.layers.priorities._client = Telling()
    for step in range(3):
        train_step(model, optimizer, step)
    assert optimizer.priority_threshold_found
    return [optimizer.priority_threshold, told, parameters_digest(model)]


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        unflatten, convolution, flatten = nn.Unflatten(1, (3, 4, 4)), nn.Conv2d(3, 8, 3), nn.Flatten()
        super().__init__(unflatten, convolution, flatten, nn.LayerNorm(32), nn.Linear(32, 4))


@pytest.mark.parametrize(
    ("options", "threshold", "classes"),
    [
        ({"priority_threshold": "coarse"}, None, [1, 1, 0, 0, 0, 0]),
        ({"priority_threshold": "0"}, 0.0, [0] * 6),
        ({"priority_threshold": "0.7"}, 0.7, [1, 1, 1, 1, 0, 0]),
        ({"priority_threshold": "1"}, 1.0, [1] * 6),
        ({"priority_threshold": "0.2", "priority_classes": 4}, 0.2, [3, 2, 1, 1, 0, 0]),
        ({"priority_threshold": "auto", "priority_classes": 1}, 0.0, [0] * 6),
    ],
)
def test_fixed_thresholds_and_classes(options: dict[str, Any], threshold: float | None, classes: list[int]) -> None:
    answers = workers.run(2, calls_of, **options)
    assert all_equal(answers)
    found, told, _ = answers[0]
    assert found == threshold
    assert told == [(6, classes, 0.0 if threshold is None else threshold)]  # once: nothing changes


def search_thresholds(steps: int) -> list[Any]:
    """A short search whose outcome depends on what each rank measures, and ranks measure differently."""
    fake = [0]

    def clock() -> int:  # of rank 0 alone the lowest threshold is best, of the sum the highest
        slope = 1 if poseidon.rank() == 0 else -2
        tried = thresholds[-1] if thresholds else 0.0
        fake[0] += int(1e9 * (10 + slope * tried))
        return fake[0]

    thresholds: list[float] = []
    model, optimizer = wrapped(True, momentum)
    with mock.patch("poseidon.adapter.priorities._now_ns", clock):
        for step in range(steps):
            inputs, targets = own_batch(step)
            optimizer.zero_grad()
            loss = mean_loss(model, inputs, targets)
            thresholds.append(optimizer.priority_threshold)
            loss.backward()
            thresholds[-1] = optimizer.priority_threshold  # that of this backward
            optimizer.step()
    return [thresholds, optimizer.priority_threshold_found, parameters_digest(model)]


def test_all_ranks_find_the_same_threshold() -> None:
    steps = threshold_search.ThresholdSearch().steps
    answers = workers.run(2, search_thresholds, steps + 3, priority_threshold="auto")
    assert all_equal(answers)
    thresholds, found, _ = answers[0]
    assert found
    assert set(thresholds[:steps]) == set(threshold_search.CANDIDATES)
    assert thresholds[-3:] == [max(threshold_search.CANDIDATES)] * 3


def plain_models_are_left_alone() -> list[Any]:
    model, optimizer = wrapped(False, momentum)
    plain_loop(model, optimizer, 2)
    rows = list(model.plan())
    return [[row.urgency for row in rows], [row.priority_class for row in rows]]


def test_plain_models_have_no_priorities() -> None:
    assert workers.run(2, plain_models_are_left_alone) == [[[None] * 6, [None] * 6]] * 2
